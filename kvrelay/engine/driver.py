"""The engine's one asyncio door: a thread that owns the engine, and handles to its sequences."""

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self

from kvrelay.engine.config import EngineConfig, EngineLoad
from kvrelay.engine.events import Event
from kvrelay.engine.sequence import SequenceSpec
from kvrelay.types import CacheChange


class SequenceHandle:
    """One sequence, seen from the event loop: `async for event in handle`, and always `await handle.close()`."""

    sequence_id: str

    def __aiter__(self) -> AsyncIterator[Event]:
        """Events in order; Tokens that nobody has read yet are one run. Ends after close() or Failed. One reader."""
        raise NotImplementedError

    def commit(self, blocks: int) -> None:
        """The prompt's whole blocks are all in the pool. An error arrives as Failed."""
        raise NotImplementedError

    def extend(self, ids: list[int], first_index: int, resume: bool = False) -> None:
        """Known output ids; resume: then sample. An error arrives as Failed."""
        raise NotImplementedError

    def stop(self) -> None:
        """Sample no more: answered by Stopped, unless it had ended."""
        raise NotImplementedError

    async def close(self, kept_blocks: int = 0) -> None:
        """Releases everything; returns when the engine has. May be called again, also at the same time."""
        raise NotImplementedError


class EngineDriver:
    """`async with EngineDriver(engine) as driver`: owns the engine's thread. Everything here is for one event loop."""

    def __init__(self, engine: object) -> None:
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        raise NotImplementedError

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        raise NotImplementedError

    @property
    def config(self) -> EngineConfig:
        """The engine's."""
        raise NotImplementedError

    @property
    def failed(self) -> "asyncio.Future[BaseException]":
        """Gets the error as its result when the engine's thread dies of one; all handles have got Failed by then."""
        raise NotImplementedError

    def open(self, spec: SequenceSpec) -> SequenceHandle:
        """Queues a sequence. Raises InvalidRequest, Overloaded, StageFailed (the engine's thread has died)."""
        raise NotImplementedError

    def load(self) -> EngineLoad:
        """As of the last step."""
        raise NotImplementedError

    async def flush_cache(self) -> int:
        """Drops every cached block that no sequence holds; returns how many."""
        raise NotImplementedError

    async def check_idle(self) -> None:
        """Raises BrokenInvariant unless nothing is held and every block is free or cached."""
        raise NotImplementedError

    async def cached_hashes(self) -> list[bytes]:
        """Parents before children."""
        raise NotImplementedError

    def cache_changes(self) -> AsyncIterator[list[CacheChange]]:
        """Batches of changes from this call on (not from the first read); of one hash only the last unread one.

        One consumer. Take cached_hashes() after this call: applying the batches to it gives the true state.
        """
        raise NotImplementedError
