"""Many legs at once that do anything at any moment and leave at any moment: no wrong token, and nothing is left."""

import asyncio
import random

import grpc
import pytest

from kvrelay.stage.app import StageApp
from kvrelay.types import Role
from tests.pipeline.stages import KvSource, LegCall, kv_source, leg, prompt, reference, sampling, stage

LEGS = 40
OUTPUT = 40
HOW = sampling(OUTPUT)
PROMPTS = [prompt(length, seed) for length in (1, 15, 16, 17, 40, 70) for seed in range(3)]


async def live(app: StageApp, source: KvSource, dice: random.Random) -> str:
    """One leg from its opening to whatever end the dice choose; says which."""
    ids = dice.choice(PROMPTS)
    want = reference(ids, HOW)
    local = dice.random() < 0.3
    budget = {"output_budget": dice.randrange(1, OUTPUT)} if dice.random() < 0.3 else {}
    async with leg(app, ids, HOW, local_prefill=local, **budget) as (call, transfer_id):
        acts = asyncio.ensure_future(act(call, source, transfer_id, ids, want, local, dice))
        reading = asyncio.ensure_future(read(call, want))
        try:
            async with asyncio.timeout(dice.choice([0.01, 0.05, 0.2, 0.5])):
                return await reading
        except TimeoutError:
            return "left"
        finally:
            call.cancel()
            for task in (acts, reading):
                task.cancel()
            await asyncio.gather(acts, reading, return_exceptions=True)


async def act(
    call: LegCall, source: KvSource, transfer_id: str, ids: list[int], want: list[int], local: bool, dice: random.Random
) -> None:
    if not local and dice.random() < 0.9:
        feed = source.compute(ids)
        source.push(call.app, transfer_id, feed, dice.randrange(len(feed.block_ids) + 1))
        if dice.random() < 0.9:
            asyncio.get_running_loop().call_later(dice.random() * 0.02, feed.publish, len(feed.block_ids))
    for _ in range(dice.randrange(6)):
        await asyncio.sleep(dice.random() * 0.02)
        some = want[call.next_index : call.next_index + dice.randrange(20)]
        match dice.randrange(5):
            case 0 | 1:
                await call.resume(some)
            case 2:
                await call.extend(some)
            case 3:
                await call.extend(want[call.next_index :], final=True)
            case 4:
                await call.stop()


async def read(call: LegCall, want: list[int]) -> str:
    """Tokens must be the reference's, each index once. (The call's own count takes refused messages for taken.)"""
    last, behind = "", 0
    try:
        while (event := await call.call.read()) is not grpc.aio.EOF:
            last = event.WhichOneof("event")
            if last in ("finished", "stopped", "drained"):
                return last
            if last == "tokens":
                first, ids = event.tokens.first_index, list(event.tokens.ids)
                assert first >= behind
                assert ids == want[first : first + len(ids)]
                behind = call.next_index = first + len(ids)
    except grpc.aio.AioRpcError as error:
        # A message written when the stage has just refused an earlier one breaks the stream on the writer's own side.
        own = error.code() is grpc.StatusCode.INTERNAL and error.details() == "Internal error from Core"
        assert own or error.code().name in ("FAILED_PRECONDITION", "RESOURCE_EXHAUSTED"), error
        return error.code().name
    return last


@pytest.fixture(scope="module", autouse=True)
def _references() -> None:
    """Made before any loop runs: they would hold it up."""
    for ids in PROMPTS:
        reference(ids, HOW)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("role", [Role.RELAY, Role.MAIN])
async def test_nothing_is_left_of_many_legs_that_do_anything(role: Role, seed: int) -> None:
    dice = random.Random(seed)
    crowded = {"pool_tokens": 640, "max_running": 5, "max_waiting": LEGS - 10, "offer_wait_s": 0.2}
    async with kv_source() as source, stage(role, **crowded) as app:
        ends: set[str] = set()
        for _ in range(3):  # on a busy machine all may have left before anything came
            legs = [live(app, source, random.Random(dice.random())) for _ in range(LEGS)]
            ends = set(await asyncio.gather(*legs))
            if ends != {"left"}:
                break
        assert ends != {"left"}
        await app.settle()
