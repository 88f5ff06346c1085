"""Cache changes on their way to one consumer. Knows hashes, no index."""

import asyncio
from collections.abc import Iterable
from typing import Self

from kvrelay.types import CacheChange


class ChangeFeed:
    """Async iterator of batches. Of changes of one hash that nobody has read yet only the last is kept.

    So an unread feed grows with the number of different hashes, not with time. The last changes of different hashes
    stay in order: a parent is still added before its children and removed after them.
    """

    def __init__(self) -> None:
        self._unread: dict[bytes, CacheChange] = {}
        self._news = asyncio.Event()
        self._over = False

    def add(self, changes: Iterable[CacheChange]) -> None:
        """More has happened."""
        for change in changes:
            self._unread.pop(change.block_hash, None)
            self._unread[change.block_hash] = change
        self._news.set()

    def end(self) -> None:
        """Nothing more will happen; what is unread can still be read."""
        self._over = True
        self._news.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[CacheChange]:
        while not self._unread:
            if self._over:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        batch = list(self._unread.values())
        self._unread.clear()
        return batch
