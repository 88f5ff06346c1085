"""What every prefix index does: the same tests and state machine over memory and over a real Redis."""

import asyncio
import hashlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import ClassVar

import pytest
import uvloop
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from kvrelay.index import store
from kvrelay.index.base import PrefixIndex
from kvrelay.index.memory import MemoryIndex
from kvrelay.index.redis import RedisIndex
from kvrelay.index.server import start_redis
from kvrelay.index.writer import InstanceWriter, OutOfStep, Superseded
from kvrelay.types import CacheChange, LayoutFingerprint, Role, StageDescription


def chain(text: str) -> list[bytes]:
    """One chained hash per character: texts with a common beginning share its hashes."""
    return [hashlib.blake2b(text[: n + 1].encode(), digest_size=16).digest() for n in range(len(text))]


def added(text: str) -> list[CacheChange]:
    return [CacheChange(True, block) for block in chain(text)]


def removed(*texts: str) -> list[CacheChange]:
    """The last block of each text."""
    return [CacheChange(False, chain(text)[-1]) for text in texts]


class Fleet(ABC):
    """Stages that announce themselves, and the index that hears of them."""

    index: PrefixIndex

    @abstractmethod
    async def start(self, name: str, cached: Iterable[str] = ()) -> None:
        """A new process under this name, after whatever end of the one before."""

    @abstractmethod
    async def change(self, name: str, changes: list[CacheChange]) -> None:
        """Its cache changes."""

    @abstractmethod
    async def leave(self, name: str) -> None:
        """It ends in good order."""

    @abstractmethod
    async def die(self, name: str) -> None:
        """It ends without a word, and that has been noticed."""

    @abstractmethod
    async def lose_everything(self, held: dict[str, set[str]]) -> None:
        """The index forgets everything; living stages, which hold `held`, notice and announce themselves anew."""

    async def depths(self, text: str) -> dict[str, int]:
        answer = await self.index.lookup(chain(text))
        assert not answer.degraded
        return {name: depth for name, depth in answer.depths.items() if depth}

    @abstractmethod
    async def check(self, held: dict[str, set[str]]) -> None:
        """Raises unless the index holds exactly this of the living, and nothing of those that left."""


class MemoryFleet(Fleet):
    def __init__(self) -> None:
        self.index = self._memory = MemoryIndex()

    async def start(self, name: str, cached: Iterable[str] = ()) -> None:
        self._memory.forget(name)
        for text in cached:
            self._memory.record(name, chain(text))

    async def change(self, name: str, changes: list[CacheChange]) -> None:
        self._memory.apply(name, changes)

    async def leave(self, name: str) -> None:
        self._memory.forget(name)

    async def die(self, name: str) -> None:
        self._memory.forget(name)

    async def lose_everything(self, held: dict[str, set[str]]) -> None:
        for name, texts in held.items():
            await self.start(name, texts)

    async def check(self, held: dict[str, set[str]]) -> None:
        found = {name: set(blocks) for name, blocks in self._memory._held.items() if blocks}
        blocks = {name: {block for text in texts for block in chain(text)} for name, texts in held.items()}
        assert found == {name: of_name for name, of_name in blocks.items() if of_name}


class RedisFleet(Fleet):
    def __init__(self, index: RedisIndex, client: store.Client) -> None:
        self.index = index
        self._client = client
        self._epoch = 0
        self._epochs: dict[str, int] = {}
        self._writers: dict[str, InstanceWriter] = {}

    async def start(self, name: str, cached: Iterable[str] = ()) -> None:
        self._epoch += 1
        self._epochs[name] = self._epoch
        writer = self._writers[name] = InstanceWriter(self._client, stage(name, self._epoch), ttl_s=600)
        await writer.begin(take_over=True)
        await writer.announce(list(dict.fromkeys(block for text in cached for block in chain(text))))

    async def change(self, name: str, changes: list[CacheChange]) -> None:
        await self._writers[name].apply(changes)

    async def leave(self, name: str) -> None:
        await self._writers.pop(name).leave()

    async def die(self, name: str) -> None:
        self._writers.pop(name)
        await self._client.delete(store.instance_key(name))  # as its TTL would
        await InstanceWriter(self._client, stage("anybody"), ttl_s=1).sweep()

    async def lose_everything(self, held: dict[str, set[str]]) -> None:
        await self._client.flushall()
        for name, texts in held.items():
            writer = self._writers[name]
            with pytest.raises(OutOfStep):
                await writer.apply()
            await writer.begin(take_over=False)
            await writer.announce(list({block for text in texts for block in chain(text)}))

    async def check(self, held: dict[str, set[str]]) -> None:
        prefix = f"{store.PREFIX}held:".encode()
        found: dict[str, set[bytes]] = {store.incarnation(name, self._epochs[name]): set() for name in held}
        async for key in self._client.scan_iter(match=prefix + b"*", count=1000):
            incarnation = key.removeprefix(prefix)[:-3].decode()  # without the colon and the bucket
            name, _, epoch = incarnation.rpartition(":")
            for block in await self._client.hkeys(key):
                assert key == store.held_key(name, int(epoch), block)
                found[incarnation].add(block)
        assert {incarnation.partition(":")[0]: blocks for incarnation, blocks in found.items()} == {
            name: {block for text in texts for block in chain(text)} for name, texts in held.items()
        }
        assert {member.decode() for member in await self._client.smembers(store.INSTANCES)} == set(found)


def stage(name: str, epoch: int = 1) -> StageDescription:
    layout = LayoutFingerprint("w", 2, 2, 8, 16, "float32", "r")
    return StageDescription(name, epoch, Role.MAIN, "b", "h:1", "tiny", "t", layout, 258, 4096, 64, 4, (257,))


@asynccontextmanager
async def redis_fleet(url: str) -> AsyncIterator[RedisFleet]:
    client = store.connect(url, timeout_s=5)
    try:
        await client.flushall()
        async with RedisIndex(url, timeout_s=5) as index:
            yield RedisFleet(index, client)
    finally:
        await client.aclose()


@pytest.fixture(params=["memory", "redis"])
async def fleet(request: pytest.FixtureRequest) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        if request.param == "memory":
            yield MemoryFleet()
        else:
            server = await stack.enter_async_context(start_redis())
            yield await stack.enter_async_context(redis_fleet(server.url))


async def test_nobody_holds_anything_at_first(fleet: Fleet) -> None:
    assert await fleet.depths("abc") == {}
    await fleet.start("m1")
    assert await fleet.depths("abc") == {}
    assert await fleet.depths("") == {}


async def test_every_depth_is_found_for_every_length_of_prompt(fleet: Fleet) -> None:
    text = "abcdefghijklmnopqrs"
    for held in range(len(text) + 1):
        await fleet.start(f"m{held}", [text[:held]])
    for asked in range(1, len(text) + 1):
        found = await fleet.depths(text[:asked])
        assert found == {f"m{held}": min(held, asked) for held in range(1, len(text) + 1)}


async def test_a_prompt_that_branches_off_scores_up_to_the_branch(fleet: Fleet) -> None:
    await fleet.start("p1", ["system-hello", "system-bye"])
    await fleet.start("m1", ["system-hello"])
    assert await fleet.depths("system-bye") == {"p1": 10, "m1": 7}
    assert await fleet.depths("other") == {}


async def test_evicted_leaves_score_no_more(fleet: Fleet) -> None:
    await fleet.start("m1", ["abcd"])
    await fleet.change("m1", removed("abcd", "abc"))
    assert await fleet.depths("abcd") == {"m1": 2}
    await fleet.change("m1", [*added("abcx"), *removed("abcx")])
    assert await fleet.depths("abcx") == {"m1": 3}


async def test_changes_that_come_twice_change_nothing(fleet: Fleet) -> None:
    await fleet.start("m1", ["ab"])
    for _ in range(2):
        await fleet.change("m1", [*added("abc"), *removed("abc"), *removed("xyz")])
    assert await fleet.depths("abc") == {"m1": 2}
    await fleet.check({"m1": {"ab"}})


async def test_entries_of_an_older_process_never_score(fleet: Fleet) -> None:
    await fleet.start("m1", ["abcdef"])
    await fleet.start("m1", ["ab"])
    assert await fleet.depths("abcdef") == {"m1": 2}
    await fleet.check({"m1": {"ab"}})


async def test_who_left_or_died_does_not_score_and_leaves_nothing_behind(fleet: Fleet) -> None:
    for name in ("m1", "m2", "m3"):
        await fleet.start(name, ["abc"])
    await fleet.leave("m1")
    await fleet.die("m2")
    assert await fleet.depths("abc") == {"m3": 3}
    await fleet.check({"m3": {"abc"}})


async def test_a_prompt_of_4096_blocks_is_looked_up_at_sixteen_instances(fleet: Fleet) -> None:
    text = "x" * 4096
    for n in range(16):
        await fleet.start(f"m{n}", [text[: n * 256 + 1]])
    assert await fleet.depths(text) == {f"m{n}": n * 256 + 1 for n in range(16)}


async def test_many_look_ups_at_once_get_their_own_answers(fleet: Fleet) -> None:
    text = "abcdefghijklmnopqrstuvwxyz"
    await fleet.start("m1", [text])
    answers = await asyncio.gather(*(fleet.depths(text[:n]) for n in range(1, 27)))
    assert answers == [{"m1": n} for n in range(1, 27)]


async def test_a_superseded_process_writes_nothing_more() -> None:
    async with start_redis() as server, redis_fleet(server.url) as fleet:
        await fleet.start("m1", ["abc"])
        old = fleet._writers["m1"]
        await fleet.start("m1", ["ab"])
        with pytest.raises(Superseded):
            await old.apply(removed("ab"))
        with pytest.raises(Superseded):
            await old.begin(take_over=False)
        await old.leave()
        assert await fleet.depths("abc") == {"m1": 2}
        await fleet.check({"m1": {"ab"}})


NAMES = st.sampled_from(["p1", "m1", "m2"])
TEXTS = st.text("ab", min_size=1, max_size=6)


class IndexMachine(RuleBasedStateMachine):
    """Stages come, go, cache and evict in any order; the index always answers as the model does."""

    runner: ClassVar[asyncio.Runner]
    fleet: Fleet

    async def reset(self) -> Fleet:
        raise NotImplementedError

    @initialize()
    def begin(self) -> None:
        self.fleet = self.runner.run(self.reset())
        self.model: dict[str, set[str]] = {}

    @rule(name=NAMES, cached=st.lists(TEXTS, max_size=2))
    def start(self, name: str, cached: list[str]) -> None:
        self.runner.run(self.fleet.start(name, cached))
        self.model[name] = {text[: n + 1] for text in cached for n in range(len(text))}

    @rule(name=NAMES, text=TEXTS)
    def cache(self, name: str, text: str) -> None:
        if name in self.model:
            new = [text[: n + 1] for n in range(len(text)) if text[: n + 1] not in self.model[name]]
            self.runner.run(self.fleet.change(name, [CacheChange(True, chain(part)[-1]) for part in new]))
            self.model[name].update(new)

    @rule(name=NAMES, choice=st.integers(0, 100), count=st.integers(1, 4))
    def evict(self, name: str, choice: int, count: int) -> None:
        changes = []
        held = self.model.get(name, set())
        for _ in range(count):
            leaves = sorted(t for t in held if not any(o != t and o.startswith(t) for o in held))
            if leaves:
                leaf = leaves[choice % len(leaves)]
                held.discard(leaf)
                changes += removed(leaf)
        if changes:
            self.runner.run(self.fleet.change(name, changes))

    @rule(name=NAMES, in_good_order=st.booleans())
    def end(self, name: str, in_good_order: bool) -> None:
        if self.model.pop(name, None) is not None:
            self.runner.run(self.fleet.leave(name) if in_good_order else self.fleet.die(name))

    @rule()
    def lose_everything(self) -> None:
        self.runner.run(self.fleet.lose_everything(self.model))

    @rule(text=TEXTS)
    def look_up(self, text: str) -> None:
        expected = {}
        for name, held in self.model.items():
            depth = sum(text[: n + 1] in held for n in range(len(text)))
            if depth:
                expected[name] = depth
        assert self.runner.run(self.fleet.depths(text)) == expected

    @invariant()
    def the_store_holds_what_the_living_hold(self) -> None:
        if hasattr(self, "model"):
            self.runner.run(self.fleet.check(self.model))


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        yield runner


MANY = settings(max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck))


def test_memory_agrees_with_the_model(runner: asyncio.Runner) -> None:
    class Machine(IndexMachine):
        async def reset(self) -> Fleet:
            return MemoryFleet()

    Machine.runner = runner
    run_state_machine_as_test(Machine, settings=MANY)


def test_redis_agrees_with_the_model(runner: asyncio.Runner) -> None:
    stack = AsyncExitStack()

    async def open_fleet() -> RedisFleet:
        server = await stack.enter_async_context(start_redis())
        return await stack.enter_async_context(redis_fleet(server.url))

    fleet = runner.run(open_fleet())

    class Machine(IndexMachine):
        async def reset(self) -> Fleet:
            await fleet._client.flushall()
            fleet._writers.clear()
            return fleet

    Machine.runner = runner
    try:
        run_state_machine_as_test(Machine, settings=MANY)
    finally:
        runner.run(stack.aclose())
