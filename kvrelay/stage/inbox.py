"""Merges several async iterators into one, and owns the tasks that read them. Knows nothing of what passes through."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from types import TracebackType
from typing import Generic, Self, TypeVar

T = TypeVar("T")


class Inbox(Generic[T]):
    """`async with Inbox() as inbox`, then `inbox.read(source)` for each source and `await inbox.next()`.

    Order is kept within a source. At most one item of each source waits, so a slow reader holds every source back. A
    source's error is raised by `next` when its turn comes; a source's end is silent. Leaving cancels what still reads
    and returns when it has ended.
    """

    def __init__(self) -> None:
        self._items: asyncio.Queue[T | BaseException] = asyncio.Queue(maxsize=1)
        self._readers: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)

    def read(self, source: AsyncIterator[T]) -> "asyncio.Task[None]":
        """Starts to take items from `source`; the task ends with it."""
        reader = asyncio.get_running_loop().create_task(self._pump(source))
        self._readers.add(reader)
        return reader

    async def next(self) -> T:
        """The next item of any source. Raises what a source raised."""
        item = await self._items.get()
        if isinstance(item, BaseException):
            raise item
        return item

    async def discard(self, reader: "asyncio.Task[None]", at_most_s: float) -> None:
        """Drops whatever comes until that reader's source has ended, but no longer than `at_most_s`."""
        dropping = asyncio.get_running_loop().create_task(self._drop())
        self._readers.add(dropping)
        await asyncio.wait({reader}, timeout=at_most_s)
        dropping.cancel()

    async def _drop(self) -> None:
        while True:
            await self._items.get()

    async def _pump(self, source: AsyncIterator[T]) -> None:
        try:
            async for item in source:
                await self._items.put(item)
        except Exception as error:
            await self._items.put(error)
        finally:
            if isinstance(source, AsyncGenerator):
                await source.aclose()
