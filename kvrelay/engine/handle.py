"""One sequence, seen from the event loop. Knows how to post commands to the engine's thread, not how they run."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Self

from kvrelay.engine.engine import Engine
from kvrelay.engine.events import Event, Failed, Tokens
from kvrelay.types import TokenRun

Command = Callable[[], None]
"""Runs on the engine's thread."""


class SequenceHandle:
    """`async for event in handle`, and always `await handle.close()`. Made by EngineDriver.open."""

    def __init__(
        self,
        sequence_id: str,
        engine: Engine,
        send: "Callable[[SequenceHandle, Command], None]",
        release: "Callable[[SequenceHandle, int], None]",
    ) -> None:
        self.sequence_id = sequence_id
        self._engine = engine
        self._send = send
        self._release = release
        self._unread: deque[Event] = deque()
        self._news = asyncio.Event()
        self._over = False
        self._closing = False
        self._released = asyncio.Event()

    def __aiter__(self) -> Self:
        """Events in order; Tokens that nobody has read yet are one run. Ends after close() or Failed. One reader."""
        return self

    async def __anext__(self) -> Event:
        while not self._unread:
            if self._over:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        return self._unread.popleft()

    def commit(self, blocks: int) -> None:
        """The prompt's `blocks` whole blocks are all in the pool. An error arrives as Failed."""
        self._command(lambda: self._engine.commit(self.sequence_id, blocks))

    def extend(self, ids: list[int], first_index: int, resume: bool = False) -> None:
        """Known output ids; resume: then sample. An error arrives as Failed."""
        self._command(lambda: self._engine.extend(self.sequence_id, ids, first_index, resume))

    def stop(self) -> None:
        """Sample no more: answered by Stopped, unless it had ended."""
        self._command(lambda: self._engine.stop(self.sequence_id))

    async def close(self, kept_blocks: int = 0) -> None:
        """Releases everything; returns when the engine has, within one step. May be called again, also at once.

        The release goes on if the caller is cancelled. kept_blocks: see Engine.close; of the first call.
        """
        if not self._closing:
            self._closing = self._over = True
            self._unread.clear()
            self._news.set()
            if not self._released.is_set():
                self._release(self, kept_blocks)
        await self._released.wait()

    def deliver(self, event: Event) -> None:
        """Part of the driver: an event has happened."""
        if self._over:
            return
        last = self._unread[-1] if self._unread else None
        if isinstance(event, Tokens) and isinstance(last, Tokens):
            self._unread[-1] = Tokens(_joined(last.run, event.run))
        else:
            self._unread.append(event)
        self._over = isinstance(event, Failed)
        self._news.set()

    def released(self) -> None:
        """Part of the driver: the engine holds nothing of this sequence any more."""
        self._released.set()

    def _command(self, command: Command) -> None:
        if not self._over:
            self._send(self, command)


def _joined(first: TokenRun, second: TokenRun) -> TokenRun:
    return TokenRun(first.first_index, first.ids + second.ids, first.logprobs + second.logprobs)
