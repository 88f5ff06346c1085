"""A stage keeps Redis told, through flushes, restarts, stalls, expiry and rivals. Real Redis throughout."""

import asyncio
import dataclasses
import signal
from collections.abc import Iterable, Sequence

import pytest

from kvrelay.index import announcer as announcer_module
from kvrelay.index import store
from kvrelay.index.announcer import IndexAnnouncer
from kvrelay.index.redis import RedisIndex
from kvrelay.index.server import RedisServer, start_redis
from kvrelay.types import CacheChange
from tests.unit.index.stages import added, chain, held, removed, stage, until


class Cache:
    """A stage's prefix cache: what it holds now, and the announcer that hears of changes."""

    def __init__(self, *texts: str) -> None:
        self.blocks: dict[bytes, None] = {}
        self.announcer: IndexAnnouncer | None = None
        self.change(*(change for text in texts for change in added(text)))

    def change(self, *changes: CacheChange) -> None:
        for change in changes:
            if change.added:
                self.blocks[change.block_hash] = None
            else:
                self.blocks.pop(change.block_hash, None)
        if self.announcer is not None:
            self.announcer.announce(changes)

    async def hashes(self) -> Sequence[bytes]:
        return list(self.blocks)

    def announced(self, url: str, name: str = "m1", *, epoch: int = 1, heartbeat_s: float = 0.2) -> IndexAnnouncer:
        self.announcer = IndexAnnouncer(
            url,
            stage(name, epoch),
            self.hashes,
            heartbeat_s=heartbeat_s,
            call_timeout_s=0.3,
            max_backoff_s=0.05,
        )
        return self.announcer


async def depth_of(index: RedisIndex, text: str, instance_id: str = "m1") -> int:
    return (await index.lookup(chain(text))).depths.get(instance_id, 0)


async def holds(client: store.Client, instance_id: str, blocks: Iterable[bytes]) -> bool:
    return await held(client, instance_id) == set(blocks)


async def nobody(index: RedisIndex) -> bool:
    return not await index.instances()


async def owns_nothing(client: store.Client, instance_id: str) -> bool:
    return not await held(client, instance_id)


def patient(url: str) -> RedisIndex:
    """An index that a busy test machine does not time out."""
    return RedisIndex(url, timeout_s=1.0, pause_s=0.01)


async def test_what_was_cached_before_and_what_changes_after_are_both_announced(server: RedisServer) -> None:
    cache = Cache("abcd")
    async with cache.announced(server.url) as announcer, patient(server.url) as index:
        await until(lambda: announcer.connected)
        assert await depth_of(index, "abcdef") == 4
        cache.change(*added("abcdef"))
        await announcer.settled()
        assert await depth_of(index, "abcdef") == 6
        cache.change(*removed("abcdef", "abcde"))
        await announcer.settled()
        assert await depth_of(index, "abcdef") == 4


async def test_changes_are_written_in_order_over_many_batches(server: RedisServer, client: store.Client) -> None:
    cache = Cache()
    async with cache.announced(server.url, heartbeat_s=10) as announcer:
        await until(lambda: announcer.connected)
        cache.change(*added("x" * 3000))
        cache.change(*(CacheChange(False, block) for block in chain("x" * 3000)[:1000:-1]))
        await announcer.settled()
        await until(lambda: holds(client, "m1", cache.blocks))
        assert announcer.announcements == 1


async def test_changes_during_the_snapshot_come_after_it(server: RedisServer, client: store.Client) -> None:
    cache = Cache("ab")
    asked, go = asyncio.Event(), asyncio.Event()

    async def slow_hashes() -> Sequence[bytes]:
        snapshot = list(cache.blocks)
        asked.set()
        await go.wait()
        return snapshot

    announcer = IndexAnnouncer(server.url, stage("m1"), slow_hashes, heartbeat_s=0.2)
    cache.announcer = announcer
    async with announcer:
        await asked.wait()
        cache.change(*added("abc"), *removed("abc"), *added("abx"))
        go.set()
        await until(lambda: announcer.connected)
        await announcer.settled()
        await until(lambda: holds(client, "m1", chain("abx")))


@pytest.mark.parametrize("with_changes", [True, False])
async def test_a_flushed_redis_is_told_everything_again(
    server: RedisServer, client: store.Client, with_changes: bool
) -> None:
    cache = Cache("abcd")
    async with cache.announced(server.url) as announcer:
        await until(lambda: announcer.connected)
        await client.flushall()
        if with_changes:
            cache.change(*added("abcdef"))
        await until(lambda: announcer.announcements >= 2 and announcer.connected)
        await announcer.settled()
        await until(lambda: holds(client, "m1", cache.blocks))


async def test_redis_may_come_late_go_and_come_back_on_its_port() -> None:
    cache = Cache("abcd")
    async with start_redis() as first:
        port, url = first.port, first.url
    async with cache.announced(url) as announcer, patient(url) as index:
        cache.change(*added("abcde"))
        assert (await index.lookup(chain("abc"))).degraded
        assert not announcer.connected
        async with start_redis(port) as second:
            await until(lambda: announcer.connected)
            assert await depth_of(index, "abcdef") == 5
            second.send(signal.SIGKILL)
            await until(lambda: not announcer.connected)
            cache.change(*removed("abcde"), *added("abcdx"))
        async with start_redis(port):
            await until(lambda: announcer.connected)
            answer = await index.lookup(chain("abcdx"))
            assert (answer.depths, answer.degraded) == ({"m1": 5}, False)


async def test_a_redis_that_comes_back_with_an_old_snapshot_is_not_built_upon(
    server: RedisServer, client: store.Client
) -> None:
    cache = Cache("abcd")
    async with cache.announced(server.url, heartbeat_s=0.2) as announcer:
        await until(lambda: announcer.connected)
        old = {key: await client.dump(key) for key in await client.keys("*")}
        cache.change(*removed("abcd", "abc"))
        await announcer.settled()
        await client.flushall()
        for key, value in old.items():
            await client.restore(key, 60_000, value)
        await until(lambda: announcer.announcements >= 2 and announcer.connected)
        await until(lambda: holds(client, "m1", chain("ab")))


async def test_a_stalled_redis_is_noticed_and_caught_up_with(server: RedisServer, client: store.Client) -> None:
    cache = Cache("ab")
    async with cache.announced(server.url) as announcer:
        await until(lambda: announcer.connected)
        server.send(signal.SIGSTOP)
        await until(lambda: not announcer.connected)
        cache.change(*added("abc"))
        server.send(signal.SIGCONT)
        await until(lambda: announcer.connected)
        await announcer.settled()
        await until(lambda: holds(client, "m1", cache.blocks))


async def test_a_stage_that_leaves_is_forgotten_at_once_and_a_dead_one_after_three_heartbeats(
    server: RedisServer, client: store.Client
) -> None:
    dead = Cache("abcd").announced(server.url, "dead")
    async with patient(server.url) as index:
        async with Cache("ab").announced(server.url, "leaves") as leaving, dead:
            await until(lambda: leaving.connected and dead.connected)
            assert (await index.lookup(chain("abcd"))).depths == {"leaves": 2, "dead": 4}
            assert {known.instance_id for known in await index.instances()} == {"leaves", "dead"}
            assert dead._task is not None
            dead._task.cancel()
            dead._connected = False  # so that its end is a death, not a leave
        await until(lambda: holds(client, "leaves", ()))
        assert [known.instance_id for known in await index.instances()] == ["dead"]
        await until(lambda: nobody(index))
        assert (await index.lookup(chain("abcd"))).depths == {}
        # What it left costs nothing but memory, and the next heartbeat of anybody frees that.
        async with Cache().announced(server.url, "other") as other:
            await until(lambda: other.connected)
            await until(lambda: owns_nothing(client, "dead"))
        assert await client.keys("*") == []


async def test_a_restarted_stage_takes_its_id_back_and_its_old_entries_never_score(
    server: RedisServer, client: store.Client
) -> None:
    before, after = Cache("abcd"), Cache("ab")
    async with before.announced(server.url, epoch=1) as old, patient(server.url) as index:
        await until(lambda: old.connected)
        async with after.announced(server.url, epoch=2) as new:
            await until(lambda: new.connected)
            assert await depth_of(index, "abcd") == 2
            # The old process has not ended yet: what it still says goes nowhere.
            before.change(*removed("ab"), *added("abcdef"))
            await until(lambda: not old.connected)
            assert await depth_of(index, "abcdef") == 2
            await until(lambda: holds(client, "m1", chain("ab")))
            [known] = await index.instances()
            assert known.epoch == 2
        # The new one has left: the old one, still alive, announces itself again.
        await until(lambda: old.connected)
        assert await depth_of(index, "abcdef") == 6


async def test_too_many_changes_at_once_become_one_announcement(
    server: RedisServer, client: store.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announcer_module, "_MAX_QUEUED", 10)
    cache = Cache()
    async with cache.announced(server.url) as announcer:
        await until(lambda: announcer.connected)
        cache.change(*added("abcdefghijklmnop"))
        cache.change(*removed("abcdefghijklmnop"))
        await until(lambda: announcer.announcements >= 2 and announcer.connected)
        await announcer.settled()
        await until(lambda: holds(client, "m1", cache.blocks))


async def test_a_redis_that_evicts_is_used_but_named(
    server: RedisServer, client: store.Client, caplog: pytest.LogCaptureFixture
) -> None:
    async with Cache("ab").announced(server.url) as announcer:
        await until(lambda: announcer.connected)
    assert "maxmemory-policy" not in caplog.text
    await client.config_set("maxmemory-policy", "allkeys-lru")
    async with Cache("ab").announced(server.url) as announcer:
        await until(lambda: announcer.connected)
    assert "maxmemory-policy allkeys-lru" in caplog.text


async def test_a_snapshot_that_fails_is_tried_again(server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    failures = iter([RuntimeError("engine is busy")])

    async def hashes() -> Sequence[bytes]:
        for failure in failures:
            raise failure
        return chain("ab")

    async with IndexAnnouncer(server.url, stage("m1"), hashes, max_backoff_s=0.05) as announcer:
        await until(lambda: announcer.connected)
    assert "unexpected; trying again" in caplog.text


async def test_without_a_url_there_is_no_index_and_nothing_to_do() -> None:
    async with Cache("ab").announced("") as announcer:
        announcer.announce(added("abc"))
        assert not announcer.connected


def test_a_url_that_is_none_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="Redis URL"):
        Cache().announced("http://localhost")


async def test_the_end_is_quick_while_redis_is_stalled(server: RedisServer) -> None:
    loop = asyncio.get_running_loop()
    async with Cache("ab").announced(server.url, heartbeat_s=5) as announcer:
        await until(lambda: announcer.connected)
        server.send(signal.SIGSTOP)
        began = loop.time()
    assert loop.time() - began < 3


async def test_the_description_crosses_redis_unchanged(server: RedisServer) -> None:
    described = dataclasses.replace(stage("m1", 2**63 + 5), pace="fixed=5", eos_token_ids=(1, 2))

    async def hashes() -> Sequence[bytes]:
        return []

    async with IndexAnnouncer(server.url, described, hashes) as announcer, patient(server.url) as index:
        await until(lambda: announcer.connected)
        assert await index.instances() == [described]
