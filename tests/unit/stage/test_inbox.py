"""The merge of several sources."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvrelay.stage.inbox import Inbox


async def numbers(*items: int) -> AsyncIterator[int]:
    for item in items:
        yield item


async def test_order_is_kept_within_a_source() -> None:
    async with Inbox[int]() as inbox:
        inbox.read(numbers(1, 2, 3))
        inbox.read(numbers(10, 20, 30))
        got = [await inbox.next() for _ in range(6)]
    assert [item for item in got if item < 10] == [1, 2, 3]
    assert [item for item in got if item >= 10] == [10, 20, 30]


async def test_a_sources_error_is_raised_when_its_turn_comes() -> None:
    async def broken() -> AsyncIterator[int]:
        yield 1
        raise ValueError("no more")

    async with Inbox[int]() as inbox:
        inbox.read(broken())
        assert await inbox.next() == 1
        with pytest.raises(ValueError, match="no more"):
            await inbox.next()


async def test_a_slow_reader_holds_a_source_back() -> None:
    given = []

    async def eager() -> AsyncIterator[int]:
        for item in range(1000):
            given.append(item)
            yield item

    async with Inbox[int]() as inbox:
        inbox.read(eager())
        await inbox.next()
        for _ in range(10):
            await asyncio.sleep(0)
        assert len(given) <= 4


@pytest.mark.parametrize("waiting_for", ["the source", "the reader"])
async def test_leaving_ends_every_source_wherever_it_waits(waiting_for: str) -> None:
    ended = []

    async def endless() -> AsyncIterator[int]:
        try:
            while True:
                yield 1
                if waiting_for == "the source":
                    await asyncio.Event().wait()
        finally:
            ended.append(True)

    async with Inbox[int]() as inbox:
        inbox.read(endless())
        await inbox.next()
        await asyncio.sleep(0)
    assert ended == [True]
