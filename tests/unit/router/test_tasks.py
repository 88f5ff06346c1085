"""Tasks with an owner, and the bell that wakes one of them."""

import asyncio

from services.router.tasks import Bell


async def test_a_ring_that_nobody_waited_for_is_kept_once() -> None:
    bell = Bell()
    bell.ring()
    bell.ring()
    await bell.rung()
    waiting = asyncio.ensure_future(bell.rung())
    await asyncio.sleep(0)
    assert not waiting.done()
    bell.ring()
    await waiting


async def test_a_ring_after_a_cancelled_wait_is_not_lost() -> None:
    bell = Bell()
    waiting = asyncio.ensure_future(bell.rung())
    await asyncio.sleep(0)
    waiting.cancel()
    bell.ring()
    await asyncio.gather(waiting, return_exceptions=True)
    async with asyncio.timeout(1):
        await bell.rung()
