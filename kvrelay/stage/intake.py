"""Who is being served by a stage, and whether more may come. Knows no message and no engine."""

import asyncio
import itertools
from collections import Counter
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kvrelay.errors import Overloaded


@dataclass(eq=False, slots=True)
class Lease:
    """One call being served; it may hold KV room until it ends."""

    request_id: str
    sequence_id: str
    """Unique in this process: a request may have several legs here, one after another or at once."""
    state: str = "OPENING"


class Intake:
    """The stage's door: every Decode and Prefill call passes `enter`; `drain` shuts it for good."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._leases: set[Lease] = set()
        self._numbers = itertools.count()
        self._releases: set[asyncio.Task[None]] = set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._watchers: set[asyncio.Event] = set()
        self.draining = False

    @contextmanager
    def enter(self, request_id: str) -> Iterator[Lease]:
        """Counts a call in until it ends. Overloaded: the stage takes no new requests."""
        if self.draining:
            raise Overloaded(f"stage {self._name} is draining: it takes no new requests")
        lease = Lease(request_id, f"{request_id}#{next(self._numbers)}")
        self._leases.add(lease)
        self._empty.clear()
        self.changed()
        try:
            yield lease
        finally:
            self._leases.discard(lease)
            if not self._leases:
                self._empty.set()
            self.changed()

    async def release(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work` to its end, whatever happens to the caller; returns then, or when the caller is cancelled."""
        task = asyncio.get_running_loop().create_task(work)
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)
        await asyncio.shield(task)

    def shut(self) -> None:
        """Lets nobody in from now on."""
        self.draining = True
        self.changed()

    async def empty(self) -> None:
        """Returns when nobody is inside and all is released."""
        await self._empty.wait()
        await asyncio.gather(*self._releases, return_exceptions=True)

    def states(self) -> dict[str, int]:
        """How many are inside, by state."""
        return dict(Counter(lease.state for lease in self._leases))

    def leftovers(self) -> dict[str, int]:
        """What is still held, by kind; all zero when idle."""
        return {"leases": len(self._leases), "releases": len(self._releases)}

    def changed(self) -> None:
        """Wakes who watches the load."""
        for watcher in self._watchers:
            watcher.set()

    @contextmanager
    def watch(self) -> Iterator[asyncio.Event]:
        """An event that is set at each change; the watcher clears it."""
        watcher = asyncio.Event()
        self._watchers.add(watcher)
        try:
            yield watcher
        finally:
            self._watchers.discard(watcher)
