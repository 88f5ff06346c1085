"""The driver: events reach their handle, close releases, cancels and engine errors never hang."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop

from kvrelay.engine.changes import ChangeFeed
from kvrelay.engine.driver import EngineDriver, SequenceHandle
from kvrelay.engine.engine import Engine, EngineConfig
from kvrelay.engine.events import Admitted, CaughtUp, Event, Failed, Finished, Paused, Stopped, Tokens
from kvrelay.engine.pace import Pace
from kvrelay.engine.sequence import SequenceSpec
from kvrelay.errors import InvalidRequest, Overloaded, ProtocolViolation, StageFailed
from kvrelay.kvcache.pool import BrokenInvariant
from kvrelay.types import CacheChange, LayoutFingerprint
from tests.fakes import fake_block_bytes, fake_model
from tests.unit.engine.probe import BLOCK, reference, sampling

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]
LIMIT_S = 10


def engine(**config: Any) -> Engine:
    return Engine(fake_model(BLOCK), EngineConfig(**{"pool_blocks": 64, **config}))


@asynccontextmanager
async def driven(**config: Any) -> AsyncIterator[EngineDriver]:
    """A driver that must be idle at the end, and a time limit on all that happens inside."""
    async with asyncio.timeout(LIMIT_S), EngineDriver(engine(**config)) as driver:
        yield driver
        await driver.check_idle()


async def until(handle: SequenceHandle, *kinds: type) -> list[Event]:
    """Events up to and including the first of these kinds."""
    seen = []
    async for event in handle:
        seen.append(event)
        if isinstance(event, kinds):
            break
    return seen


def ids_of(events: list[Event]) -> list[int]:
    return [one for event in events if isinstance(event, Tokens) for one in event.run.ids]


def answer(max_tokens: int = 8, **change: Any) -> list[int]:
    return list(reference(tuple(PROMPT), sampling(max_tokens=max_tokens, **change), 256).ids)


async def test_many_sequences_at_once_get_their_own_tokens_in_order() -> None:
    async with driven() as driver:

        async def one(seed: int) -> None:
            handle = driver.open(SequenceSpec(f"s{seed}", PROMPT, sampling(seed=seed)))
            assert ids_of(await until(handle, Finished)) == answer(seed=seed)
            await handle.close()

        async with asyncio.TaskGroup() as group:
            for seed in range(24):
                group.create_task(one(seed))


async def test_a_leg_runs_from_kv_written_on_the_loop_to_the_end() -> None:
    async with driven() as driver:
        handle = driver.open(SequenceSpec("leg", PROMPT, sampling(), await_kv=True, held=True))
        admitted = (await until(handle, Admitted))[-1]
        assert isinstance(admitted, Admitted)
        for at, block in enumerate(admitted.block_ids):
            driver.engine.pool.write(block, 0, fake_block_bytes(PROMPT, at, BLOCK))
        handle.commit(2)
        assert (await until(handle, CaughtUp))[-1] == CaughtUp(0)
        handle.extend(answer()[:3], 0)
        assert (await until(handle, CaughtUp))[-1] == CaughtUp(3)
        handle.extend(answer()[3:4], 3, resume=True)
        assert ids_of(await until(handle, Finished)) == answer()[4:]
        await handle.close()


async def test_tokens_that_nobody_reads_become_one_run() -> None:
    async with driven() as driver:
        handle = driver.open(SequenceSpec("s", PROMPT, sampling(max_tokens=30, logprobs=1)))
        while driver.load().steps < 30:
            await driver.cached_hashes()  # answered between two steps
        runs = [event.run for event in await until(handle, Finished) if isinstance(event, Tokens)]
        assert len(runs) == 1 and runs[0].ids == tuple(answer(30)) and len(runs[0].logprobs) == 30
        await handle.close()


async def test_stop_is_answered_and_close_ends_the_iteration() -> None:
    async with driven(pace=Pace(fixed=2)) as driver:
        handle = driver.open(SequenceSpec("s", PROMPT, sampling(max_tokens=200)))
        tokens = ids_of(await until(handle, Tokens))
        handle.stop()
        seen = await until(handle, Stopped)
        tokens += ids_of(seen)
        assert seen[-1] == Stopped(len(tokens))
        await handle.close()
        assert [event async for event in handle] == []
        handle.stop()


@pytest.mark.parametrize("after", [0, 1, 3])
async def test_close_while_running_releases_within_a_step_and_wakes_the_reader(after: int) -> None:
    async with driven(pace=Pace(fixed=20)) as driver:
        handle = driver.open(SequenceSpec("s", PROMPT, sampling(max_tokens=200)))
        for _ in range(after):
            await until(handle, Tokens)
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            reader = group.create_task(until(handle, Finished))
            await asyncio.sleep(0)
            began = loop.time()
            await asyncio.gather(handle.close(), handle.close(), handle.close())
            assert loop.time() - began < 0.5
        assert not any(isinstance(event, Finished) for event in reader.result())
        await driver.check_idle()
        await handle.close()


async def test_a_cancelled_owner_releases_in_finally_even_if_cancelled_there_again() -> None:
    async with driven(pace=Pace(fixed=5)) as driver:

        async def own() -> None:
            handle = driver.open(SequenceSpec("s", PROMPT, sampling(max_tokens=200)))
            try:
                await until(handle, Finished)
            finally:
                await handle.close()

        for _ in range(5):
            task = asyncio.ensure_future(own())
            await asyncio.sleep(0)
            await driver.cached_hashes()
            task.cancel()
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await driver.check_idle()  # the release went on though its waiter was cancelled


async def test_the_closed_id_can_be_opened_again_at_once() -> None:
    async with driven() as driver:
        for _ in range(20):
            handle = driver.open(SequenceSpec("s", PROMPT, sampling(max_tokens=2)))
            with pytest.raises(ProtocolViolation, match="open already"):
                driver.open(SequenceSpec("s", PROMPT, sampling()))
            await until(handle, Tokens)
            await handle.close()


async def test_bad_and_too_many_requests_are_refused_at_the_door() -> None:
    async with driven(max_running=1, max_waiting=1) as driver:
        with pytest.raises(InvalidRequest, match="prompt_ids"):
            driver.open(SequenceSpec("s", [], sampling()))
        first = driver.open(SequenceSpec("a", PROMPT, sampling()))
        second = driver.open(SequenceSpec("b", PROMPT, sampling()))
        with pytest.raises(Overloaded):
            driver.open(SequenceSpec("c", PROMPT, sampling()))
        await first.close()
        third = driver.open(SequenceSpec("c", PROMPT, sampling()))
        await until(second, Finished)
        await second.close()
        await until(third, Finished)
        await third.close()


async def test_a_wrong_message_fails_its_own_sequence_only() -> None:
    async with driven() as driver:
        good = driver.open(SequenceSpec("good", PROMPT, sampling(max_tokens=40)))
        bad = driver.open(SequenceSpec("bad", PROMPT, sampling(), held=True))
        worse = driver.open(SequenceSpec("worse", PROMPT, sampling(), held=True))
        bad.extend([1], 5)
        worse.commit(2)
        for handle, message in ((bad, "first_index 5, next index 0"), (worse, "awaits no KV")):
            failed = (await until(handle, Failed))[-1]
            assert isinstance(failed, Failed) and message in str(failed.error)
            assert [event async for event in handle] == []
            await handle.close()
        assert len(ids_of(await until(good, Finished))) == 40
        await good.close()


async def test_an_error_in_the_engine_fails_everything_and_hangs_nothing() -> None:
    async with asyncio.timeout(LIMIT_S):
        broken = engine(pace=Pace(fixed=1))
        async with EngineDriver(broken) as driver:
            running = driver.open(SequenceSpec("a", PROMPT, sampling(max_tokens=200)))
            held = driver.open(SequenceSpec("b", PROMPT, sampling(), await_kv=True, held=True))
            changes = driver.cache_changes()
            await until(running, Tokens)
            broken._runner._model.error = RuntimeError("device lost")  # type: ignore[attr-defined]
            for handle in (running, held):
                failed = (await until(handle, Failed))[-1]
                assert isinstance(failed, Failed) and isinstance(failed.error, StageFailed)
                assert "device lost" not in str(failed.error)
            assert str(await driver.failed) == "device lost"
            with pytest.raises(StageFailed):
                driver.open(SequenceSpec("c", PROMPT, sampling()))
            with pytest.raises(StageFailed):
                await driver.flush_cache()
            await running.close()
            await held.close()
            async for _ in changes:
                pass


async def test_leaving_with_open_sequences_fails_them_and_ends_the_thread() -> None:
    async with asyncio.timeout(LIMIT_S):
        async with EngineDriver(engine(pace=Pace(fixed=1))) as driver:
            handle = driver.open(SequenceSpec("a", PROMPT, sampling(max_tokens=200)))
            await until(handle, Tokens)
        assert isinstance((await until(handle, Failed))[-1], Failed)
        await handle.close()
        assert driver.failed.cancelled()
        with pytest.raises(StageFailed, match="closed"):
            driver.open(SequenceSpec("b", PROMPT, sampling()))


async def test_flush_and_cached_hashes_answer_between_steps_and_check_idle_names_what_is_open() -> None:
    async with driven() as driver:
        handle = driver.open(SequenceSpec("s", PROMPT, sampling()))
        await until(handle, Finished)
        with pytest.raises(BrokenInvariant, match="open sequences: s"):
            await driver.check_idle()
        assert len(await driver.cached_hashes()) == 4
        assert await driver.flush_cache() == 0
        await handle.close()
        assert await driver.flush_cache() == 4
        assert driver.config.pool_blocks == 64


async def test_cache_changes_from_the_call_on_replay_onto_the_hashes_taken_after_it() -> None:
    async with driven(pool_blocks=8) as driver:

        async def run(at: int) -> None:
            handle = driver.open(SequenceSpec(f"s{at}", [at, *PROMPT], sampling()))
            await until(handle, Finished)
            await handle.close()

        await run(0)
        feed = driver.cache_changes()
        await run(1)
        known = set(await driver.cached_hashes())
        for at in range(2, 6):
            await run(at)
        await asyncio.sleep(0)
        for change in await anext(feed):
            (known.add if change.added else known.discard)(change.block_hash)
        assert known == set(await driver.cached_hashes())
        second = driver.cache_changes()
        assert [batch async for batch in feed] == []
        assert second is not feed


async def test_a_change_feed_keeps_the_last_change_of_each_hash_in_order() -> None:
    feed = ChangeFeed()
    feed.add([CacheChange(True, b"a"), CacheChange(True, b"b")])
    feed.add([CacheChange(False, b"b"), CacheChange(False, b"a"), CacheChange(True, b"a")])
    assert await anext(feed) == [CacheChange(False, b"b"), CacheChange(True, b"a")]
    feed.end()
    assert [batch async for batch in feed] == []


async def test_a_pause_leaves_the_engine_asleep_until_the_next_command() -> None:
    async with driven() as driver:
        handle = driver.open(SequenceSpec("p", PROMPT, sampling(), output_budget=1))
        assert isinstance((await until(handle, Paused))[-1], Paused)
        steps = driver.load().steps
        await driver.cached_hashes()
        assert not driver.engine.has_work()
        assert driver.load().steps == steps
        await handle.close()


def test_a_loop_that_closes_first_leaves_no_thread_behind() -> None:
    driver = EngineDriver(engine(pace=Pace(fixed=1)))

    async def abandon() -> None:
        await driver.__aenter__()
        handle = driver.open(SequenceSpec("a", PROMPT, sampling(max_tokens=200)))
        await until(handle, Tokens)

    loop = uvloop.new_event_loop()
    loop.run_until_complete(abandon())
    loop.close()
    driver._thread.join(LIMIT_S)
    assert not driver._thread.is_alive()
    assert not any(one.name == "kvrelay-engine" for one in threading.enumerate())


def test_a_fake_block_has_the_layouts_size() -> None:
    layout: LayoutFingerprint = fake_model(BLOCK).layout
    assert len(fake_block_bytes(PROMPT, 1, BLOCK)) == layout.block_bytes
