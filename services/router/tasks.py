"""Tasks with an owner: started here, cancelled and awaited here. Knows nothing of what they do."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

log = logging.getLogger(__name__)


class OwnedTasks:
    """A set of tasks that ends with its owner's `aclose`. A task that fails is logged: it should have handled that."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Runs `work` until it ends or the owner closes."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def aclose(self) -> None:
        """Cancels what still runs and waits for it."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("task %s failed", task.get_name(), exc_info=error)


class Bell:
    """Wakes the one task that waits for it; a ring that nobody waited for is kept. Cheaper than an asyncio.Event."""

    __slots__ = ("_rang", "_waiter")

    def __init__(self) -> None:
        self._rang = False
        self._waiter: asyncio.Future[None] | None = None

    def ring(self) -> None:
        """Something has happened."""
        self._rang = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def rung(self) -> None:
        """Returns once it has rung since the last time."""
        if not self._rang:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._rang = False
