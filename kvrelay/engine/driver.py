"""The engine's one asyncio door: a thread that owns the engine. Knows threads and one event loop, no gRPC.

Loop -> thread: commands in a SimpleQueue, which cannot lose a wake-up. Thread -> loop: a call_soon_threadsafe with all
that happened before the model ran, and one after it. The thread sleeps in the queue when the engine has nothing to do.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

from kvrelay.engine.changes import ChangeFeed
from kvrelay.engine.config import EngineConfig, EngineLoad
from kvrelay.engine.engine import Engine, Happened
from kvrelay.engine.events import Failed
from kvrelay.engine.handle import Command, SequenceHandle
from kvrelay.engine.sequence import SequenceSpec
from kvrelay.errors import KvrelayError, Overloaded, ProtocolViolation, StageFailed
from kvrelay.types import CacheChange

__all__ = ["EngineDriver", "SequenceHandle"]

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Round:
    """What one round of the engine's thread has to tell the loop."""

    events: Happened
    changes: list[CacheChange]
    load: EngineLoad


class EngineDriver:
    """`async with EngineDriver(engine) as driver`: owns the engine's thread. Everything here is for one event loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._handles: dict[str, SequenceHandle] = {}
        self._calls: set[asyncio.Future[Any]] = set()
        self._feed: ChangeFeed | None = None
        self._load = engine.load()
        self._down: str | None = "the engine has not started"

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._failed: asyncio.Future[BaseException] = self._loop.create_future()
        self._ended = asyncio.Event()
        self._down = None
        # A daemon: if the loop dies without __aexit__, the process can still end.
        self._thread = threading.Thread(target=self._main, name="kvrelay-engine", daemon=True)
        self._thread.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the thread after the step under way; sequences still open get Failed."""
        self._down = self._down or "the engine is closed"
        self._commands.put(None)
        await self._ended.wait()
        self._abandon(StageFailed(self._down))
        if not self._failed.done():
            self._failed.cancel()

    @property
    def config(self) -> EngineConfig:
        """The engine's."""
        return self._engine.config

    @property
    def engine(self) -> Engine:
        """For what is constant: pool, layout, max_model_tokens. Everything else belongs to the thread."""
        return self._engine

    @property
    def failed(self) -> "asyncio.Future[BaseException]":
        """Gets the error as its result when the engine's thread dies of one; all handles have got Failed by then.

        Cancelled when the driver is closed in good health.
        """
        return self._failed

    def open(self, spec: SequenceSpec) -> SequenceHandle:
        """Queues a sequence. Raises InvalidRequest, Overloaded, ProtocolViolation (the id is in use), StageFailed."""
        if self._down:
            raise StageFailed(self._down)
        self._engine.validate(spec)
        if spec.sequence_id in self._handles:
            raise ProtocolViolation(f"sequence {spec.sequence_id} is open already")
        limit = self.config.max_running + self.config.max_waiting
        if len(self._handles) >= limit:  # the engine's own rule, known here without asking its thread
            raise Overloaded(f"{limit} sequences are open, the most allowed (max_running + max_waiting)")
        handle = SequenceHandle(spec.sequence_id, self._engine, self._send, self._release)
        self._handles[spec.sequence_id] = handle
        self._send(handle, lambda: self._engine.add(spec))
        return handle

    def load(self) -> EngineLoad:
        """As of the last step."""
        return self._load

    async def flush_cache(self) -> int:
        """Drops every cached block that no sequence holds; returns how many."""
        return await self._call(self._engine.flush_cache)

    async def check_idle(self) -> None:
        """Raises BrokenInvariant unless nothing is held and every block is free or cached."""
        await self._call(self._engine.check_idle)

    async def cached_hashes(self) -> list[bytes]:
        """Parents before children."""
        return await self._call(self._engine.cached_hashes)

    def cache_changes(self) -> AsyncIterator[list[CacheChange]]:
        """Batches of changes from this call on (not from the first read); of one hash only the last unread one.

        One consumer: a second call ends the first. Take cached_hashes() after this call: applying the batches to it
        gives the true state.
        """
        if self._feed is not None:
            self._feed.end()
        self._feed = ChangeFeed()
        if self._down:
            self._feed.end()
        return self._feed

    def _send(self, handle: SequenceHandle, command: Command) -> None:
        """Sends a command of one sequence to the thread; its KvrelayError ends that sequence only."""

        def guarded() -> None:
            try:
                command()
            except KvrelayError as error:
                if not self._engine.fail(handle.sequence_id, error):
                    self._tell(handle.deliver, Failed(error))

        self._commands.put(guarded)

    def _release(self, handle: SequenceHandle, kept_blocks: int) -> None:
        def close() -> None:
            self._engine.close(handle.sequence_id, kept_blocks)
            self._tell(self._forget, handle)

        self._commands.put(close)

    async def _call(self, work: Callable[[], T]) -> T:
        """Runs `work` on the thread between two steps; its error is the caller's."""
        if self._down:
            raise StageFailed(self._down)
        result: asyncio.Future[T] = self._loop.create_future()
        self._calls.add(result)
        result.add_done_callback(self._calls.discard)

        def command() -> None:
            try:
                value = work()
            except Exception as error:
                self._tell(_settle, result, None, error)
            else:
                self._tell(_settle, result, value, None)

        self._commands.put(command)
        return await result

    # -- on the engine's thread --------------------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            while self._round():
                pass
        except BaseException as error:
            log.exception("the engine's thread has died")
            self._tell(self._die, error)
        self._tell(self._ended.set)

    def _round(self) -> bool:
        """Commands, one step, what happened; False: time to end.

        What needs no model is told before it runs: KV may be sent as soon as it has a place, whatever a step takes.
        """
        engine = self._engine
        if not self._obey(wait=not engine.has_work()):
            return False
        return self._report(engine.step(self._report) if engine.has_work() else [])

    def _report(self, events: Happened) -> bool:
        return self._tell(self._deliver, _Round(events, self._engine.take_cache_changes(), self._engine.load()))

    def _obey(self, wait: bool) -> bool:
        """Runs the commands that have come, and waits for the first if asked to; False: time to end."""
        while True:
            try:
                command = self._commands.get(block=wait)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()
            wait = False

    def _tell(self, callback: Callable[..., object], *args: object) -> bool:
        """Runs a callback on the loop; False if that is closed: nobody can be told anything any more."""
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            return False
        return True

    # -- on the loop -------------------------------------------------------------------------------------------------

    def _deliver(self, happened: _Round) -> None:
        self._load = happened.load
        for sequence_id, event in happened.events:
            handle = self._handles.get(sequence_id)
            if handle is not None:
                handle.deliver(event)
        if self._feed is not None and happened.changes:
            self._feed.add(happened.changes)

    def _forget(self, handle: SequenceHandle) -> None:
        del self._handles[handle.sequence_id]
        handle.released()

    def _die(self, error: BaseException) -> None:
        self._down = f"the engine has failed: {type(error).__name__}"
        self._abandon(StageFailed(self._down))
        if not self._failed.done():
            self._failed.set_result(error)

    def _abandon(self, error: StageFailed) -> None:
        """Nobody waits for an engine that is gone."""
        for handle in self._handles.values():
            handle.deliver(Failed(error))
            handle.released()
        self._handles.clear()
        for call in list(self._calls):
            if not call.done():
                call.set_exception(error)
        if self._feed is not None:
            self._feed.end()


def _settle(result: "asyncio.Future[T]", value: T, error: Exception | None) -> None:
    if result.done():
        return
    if error is not None:
        result.set_exception(error)
    else:
        result.set_result(value)
