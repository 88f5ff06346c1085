"""Look-ups never wait long and never raise, whatever Redis does."""

import asyncio
import signal

import pytest

from kvrelay.index import store
from kvrelay.index.redis import RedisIndex
from kvrelay.index.server import RedisServer, start_redis
from kvrelay.index.writer import InstanceWriter
from tests.unit.index.stages import chain, stage, until


class Observed(list[str]):
    """Outcomes of look-ups."""

    def __call__(self, outcome: str, seconds: float) -> None:
        assert seconds >= 0
        self.append(outcome)


async def announce(client: store.Client, instance_id: str, text: str) -> None:
    writer = InstanceWriter(client, stage(instance_id), ttl_s=60)
    await writer.begin(take_over=True)
    await writer.announce(chain(text))


async def test_a_stalled_redis_costs_the_time_out_and_no_more(server: RedisServer, client: store.Client) -> None:
    await announce(client, "m1", "abc")
    observed = Observed()
    loop = asyncio.get_running_loop()
    async with RedisIndex(server.url, observe=observed, failures=100) as index:
        await until(lambda: answers(index))
        server.send(signal.SIGSTOP)
        waits = []
        for _ in range(5):
            began = loop.time()
            assert (await index.lookup(chain("abc"))).degraded
            waits.append(loop.time() - began)
        # The machine may be busy with something else, but not each time.
        assert min(waits) < 0.05
        assert max(waits) < 0.5
        server.send(signal.SIGCONT)
        await until(lambda: answers(index))
    assert "timeout" in observed


async def answers(index: RedisIndex) -> bool:
    answer = await index.lookup(chain("abc"))
    return not answer.degraded and answer.depths == {"m1": 3}


async def test_replies_of_calls_that_were_given_up_reach_nobody(server: RedisServer, client: store.Client) -> None:
    await announce(client, "m1", "abcdefgh")
    async with RedisIndex(server.url, timeout_s=5, failures=100) as index:
        assert (await index.lookup(chain("a"))).depths == {"m1": 1}
        server.send(signal.SIGSTOP)
        given_up = [asyncio.create_task(index.lookup(chain("abcdefgh"[:n]))) for n in range(1, 9)]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await asyncio.gather(*given_up)
        server.send(signal.SIGCONT)
        for n in (5, 3, 8, 1) * 3:
            assert (await index.lookup(chain("abcdefgh"[:n]))).depths == {"m1": n}


async def test_the_breaker_spares_requests_the_time_out_and_closes_when_redis_answers() -> None:
    observed = Observed()
    async with start_redis() as first:
        port, url = first.port, first.url
    async with RedisIndex(url, timeout_s=1, failures=3, pause_s=0.1, observe=observed) as index:
        for _ in range(5):
            assert (await index.lookup(chain("a"))).degraded
        assert observed == ["error"] * 3 + ["open"] * 2
        assert not index.connected
        async with start_redis(port):
            await until(lambda: closes(index))
        assert observed[-1] == "ok"


async def closes(index: RedisIndex) -> bool:
    await index.lookup(chain("a"))
    return index.connected


async def test_more_look_ups_than_places_wait_their_turn_and_trip_no_breaker(
    server: RedisServer, client: store.Client
) -> None:
    await announce(client, "m1", "abc")
    observed = Observed()
    async with RedisIndex(server.url, timeout_s=0.1, at_once=1, failures=2, observe=observed) as index:
        await until(lambda: answers(index))
        server.send(signal.SIGSTOP)
        answers_ = await asyncio.gather(*(index.lookup(chain("abc")) for _ in range(10)))
        server.send(signal.SIGCONT)
        assert all(answer.degraded for answer in answers_)
        assert observed.count("timeout") == 1
        assert observed.count("busy") == 9
        assert index.connected


async def test_instances_are_the_last_known_while_redis_is_away(server: RedisServer, client: store.Client) -> None:
    await announce(client, "m1", "abc")
    async with RedisIndex(server.url, instances_timeout_s=0.1) as index:
        assert await index.instances() == [stage("m1")]
        server.send(signal.SIGSTOP)
        assert await index.instances() == [stage("m1")]


async def test_a_description_of_another_version_is_left_out_and_said_once(
    server: RedisServer, client: store.Client, caplog: pytest.LogCaptureFixture
) -> None:
    await announce(client, "m1", "abc")
    await announce(client, "m2", "abc")
    await client.hset(store.instance_key("m2"), "description", '{"instance_id": "m2"}')
    async with RedisIndex(server.url) as index:
        assert await index.instances() == await index.instances() == [stage("m1")]
    assert len([r for r in caplog.records if "not a stage description" in r.getMessage()]) == 1


async def test_keys_of_a_wrong_kind_degrade_and_raise_nothing(server: RedisServer, client: store.Client) -> None:
    await client.set(store.INSTANCES, "someone else's")
    async with RedisIndex(server.url, timeout_s=1) as index:
        assert (await index.lookup(chain("abc"))).degraded
        assert await index.instances() == []


@pytest.mark.parametrize("own", range(4))
async def test_entries_of_another_epoch_never_score_even_if_nobody_cleared_them(
    server: RedisServer, client: store.Client, own: int
) -> None:
    await announce(client, "m1", "abc"[:own])
    for block in chain("abc")[own:]:
        await client.hset(store.held_key("m1", 999, block), block, "")
    await client.sadd(store.INSTANCES, store.incarnation("m1", 999))
    async with RedisIndex(server.url, timeout_s=1) as index:
        assert (await index.lookup(chain("abc"))).depths.get("m1", 0) == own


async def test_a_stage_scores_only_once_its_whole_cache_is_announced(server: RedisServer, client: store.Client) -> None:
    await announce(client, "m1", "abc")
    async with RedisIndex(server.url, timeout_s=1) as index:
        writer = InstanceWriter(client, stage("m1"), ttl_s=60)
        await writer.begin(take_over=True)
        assert (await index.lookup(chain("abc"))).depths == {}
        assert await index.instances() == [stage("m1")]
        await writer.announce(chain("abcd"))
        assert (await index.lookup(chain("abcd"))).depths == {"m1": 4}


async def test_an_empty_prompt_asks_nobody() -> None:
    async with RedisIndex("redis://127.0.0.1:9/0", timeout_s=0.1) as index:
        answer = await index.lookup([])
        assert (answer.depths, answer.degraded) == ({}, False)


async def test_a_caller_that_leaves_while_the_breaker_probes_does_not_keep_it_open(server: RedisServer) -> None:
    async with RedisIndex(server.url, timeout_s=0.1, failures=1, pause_s=0.01) as index:
        server.send(signal.SIGSTOP)
        assert (await index.lookup(chain("a"))).degraded
        await until(lambda: probed_and_left(index))
        server.send(signal.SIGCONT)
        await until(lambda: closes(index))


async def probed_and_left(index: RedisIndex) -> bool:
    """One probe was under way, and cancelled."""
    probe = asyncio.create_task(index.lookup(chain("a")))
    await asyncio.wait([probe], timeout=0.01)
    return probe.cancel()


async def test_whether_it_is_connected_follows_redis_without_any_look_up(server: RedisServer) -> None:
    async with RedisIndex(server.url, failures=1, instances_timeout_s=0.1) as index:
        assert index.connected
        server.send(signal.SIGSTOP)
        await index.instances()
        assert not index.connected
        server.send(signal.SIGCONT)
        await until(lambda: lists(index))


async def lists(index: RedisIndex) -> bool:
    await index.instances()
    return index.connected
