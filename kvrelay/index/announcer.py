"""A stage's side of the shared index: everything its cache holds, in order, for as long as it lives. Asks nothing."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Self

from redis.exceptions import RedisError

from kvrelay.index import store
from kvrelay.index.writer import InstanceWriter, OutOfStep, Superseded
from kvrelay.types import CacheChange, StageDescription

log = logging.getLogger(__name__)

_MAX_QUEUED = 200_000
"""Beyond it announcing the cache anew is cheaper than its history."""
_LEAVE_S = 2.0
"""How long a clean end may spend on forgetting; the instance key's TTL does the rest."""


class IndexAnnouncer:
    """Keeps Redis told. Works without Redis, and announces everything when it comes, comes back, or has lost anything.

    Nothing here raises to the caller: `connected` says whether the index is up to date with this stage.
    An empty `url` means that there is no index.
    """

    def __init__(
        self,
        url: str,
        description: StageDescription,
        hashes: Callable[[], Awaitable[Sequence[bytes]]],
        *,
        heartbeat_s: float = 2.0,
        call_timeout_s: float = 2.0,
        max_backoff_s: float = 2.0,
    ) -> None:
        """`hashes()` -> all block hashes in the cache, parents first. It must reflect every change that was announced
        before it was called. The instance key lives three heartbeats. ValueError: not a Redis URL.
        """
        self._client = store.connect(url, timeout_s=call_timeout_s) if url else None
        self._description = description
        self._hashes = hashes
        self._heartbeat_s = heartbeat_s
        self._call_timeout_s = call_timeout_s
        self._max_backoff_s = max_backoff_s
        self._queue: deque[CacheChange] = deque()
        self._keeping = False
        self._overflowed = False
        self._connected = False
        self._changed = asyncio.Event()
        self._settled = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._owned = False
        self.announcements = 0
        """Times that the whole cache was announced."""
        self.changes = 0
        """Single changes written since."""

    async def __aenter__(self) -> Self:
        if self._client is not None:
            self._task = asyncio.create_task(self._run(), name="index announcer")
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._client is None or self._task is None:
            return
        self._task.cancel()
        await asyncio.wait([self._task])
        was_connected, self._connected = self._connected, False
        try:
            if was_connected:
                async with asyncio.timeout(_LEAVE_S):
                    await self._writer(self._client).leave()
        except (RedisError, OSError, TimeoutError) as error:
            log.info("prefix index keeps this stage until its key expires: %r", error)
        finally:
            await self._client.aclose()

    @property
    def connected(self) -> bool:
        """Everything but the changes on their way is in Redis."""
        return self._connected

    def announce(self, changes: Iterable[CacheChange]) -> None:
        """Changes of the cache, in order; returns at once."""
        if not self._keeping:
            return  # they will be in the snapshot
        self._queue.extend(changes)
        if self._queue:
            self._settled.clear()
            self._changed.set()
        if len(self._queue) > _MAX_QUEUED:
            self._queue.clear()
            self._overflowed = True

    async def settled(self) -> None:
        """Returns once all that was announced before is in Redis; waits for Redis if need be."""
        await self._settled.wait()

    async def _run(self) -> None:
        assert self._client is not None
        clock = asyncio.get_running_loop().time
        backoff_s = 0.0
        while True:
            began = clock()
            try:
                await self._session(self._writer(self._client))
            except (OutOfStep, Superseded, RedisError, OSError, TimeoutError) as exc:
                reason: BaseException = exc
            except Exception as exc:
                log.exception("prefix index: unexpected; trying again")
                reason = exc
            lost = "lost, announcing anew" if self._connected else "not reached"
            log.log(logging.WARNING if self._connected else logging.DEBUG, "prefix index %s: %r", lost, reason)
            if clock() - began > self._max_backoff_s:
                backoff_s = 0.0
            self._connected = self._keeping = False
            self._settled.clear()
            self._queue.clear()
            await asyncio.sleep(backoff_s)
            backoff_s = min(self._max_backoff_s, backoff_s * 2 or 0.05)

    async def _session(self, writer: InstanceWriter) -> None:
        """Announce everything, then every change and a heartbeat; ends only by an exception."""
        # The first claim takes the id from a dead process's key; later ones leave it to whoever came after us.
        await writer.begin(take_over=not self._owned)
        self._owned = True
        if (policy := await writer.eviction()) != "noeviction":
            log.warning("redis has maxmemory-policy %s: it may drop entries of the prefix index unseen", policy)
        # From here on changes are kept: those that the snapshot has already are applied twice, which changes nothing.
        self._keeping, self._overflowed = True, False
        snapshot = await self._hashes()
        await writer.announce(snapshot)
        self.announcements += 1
        self._connected = True
        log.info("prefix index knows %d blocks of this stage", len(snapshot))
        while True:
            await self._write_changes(writer, self._heartbeat_s)
            await writer.apply()
            await writer.sweep()

    async def _write_changes(self, writer: InstanceWriter, for_s: float) -> None:
        """Write changes as they come, for that long."""
        end = asyncio.get_running_loop().time() + for_s
        while True:
            while self._queue:
                batch = [self._queue.popleft() for _ in range(min(writer.BATCH, len(self._queue)))]
                await writer.apply(batch)
                self.changes += len(batch)
            if self._overflowed:
                raise OutOfStep("too many changes at once")
            self._changed.clear()
            self._settled.set()
            try:
                async with asyncio.timeout_at(end):
                    await self._changed.wait()
            except TimeoutError:
                return

    def _writer(self, client: store.Client) -> InstanceWriter:
        return InstanceWriter(
            client, self._description, ttl_s=self._heartbeat_s * 3, call_timeout_s=self._call_timeout_s
        )
