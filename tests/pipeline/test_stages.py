"""Prefill and decode stages joined as a router joins them: the tokens are the reference's, whatever is hit or lost."""

from collections.abc import AsyncIterator

import grpc
import pytest

from kvrelay.proto.v1 import common_pb2, prefill_pb2
from kvrelay.stage.app import StageApp
from kvrelay.types import Role
from tests.pipeline.stages import leg, prefill, prompt, reference, sampling, stage, target

PushEnded = prefill_pb2.PushEnded
HOW = sampling(24)


@pytest.fixture
async def p() -> AsyncIterator[StageApp]:
    async with stage(Role.PREFILL, token_budget=32, push_patience_s=0.3) as app:
        yield app


@pytest.fixture
async def md() -> AsyncIterator[StageApp]:
    async with stage(Role.MAIN) as app:
        yield app


@pytest.fixture
async def rld() -> AsyncIterator[StageApp]:
    async with stage(Role.RELAY) as app:
        yield app


async def answer(p: StageApp, md: StageApp, ids: list[int]) -> tuple[list[int], int, int]:
    """P -> MD; the tokens, and the hits at P and MD."""
    async with leg(md, ids, HOW) as (call, transfer_id), prefill(p, ids, HOW, [target(md, transfer_id)]) as filling:
        cached = (await filling.until("started")).cached_tokens
        first = await filling.until("first_token")
        assert (first.first_index, first.source) == (0, common_pb2.SOURCE_PREFILL)
        await call.resume(first.ids)
        hit = (await call.expect("opened")).cached_tokens
        await call.until("finished")
        await call.ended()
        await filling.rest()
        assert filling.ends()[transfer_id].outcome == PushEnded.OUTCOME_COMMITTED
        return [*first.ids, *call.ids], cached, hit


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 33, 100])
async def test_prefill_and_main_say_the_reference_and_say_it_again_from_their_caches(
    p: StageApp, md: StageApp, length: int
) -> None:
    ids = prompt(length)
    assert await answer(p, md, ids) == (reference(ids, HOW), 0, 0)
    at_prefill, at_main = (length - 1) // 16 * 16, length // 16 * 16
    assert await answer(p, md, ids) == (reference(ids, HOW), at_prefill, at_main)


@pytest.mark.parametrize(("at_p", "at_md"), [(0, 70), (70, 0), (33, 64), (64, 16), (64, 64)])
async def test_hits_of_any_length_on_either_side(p: StageApp, md: StageApp, at_p: int, at_md: int) -> None:
    ids = prompt(70)
    if at_p:
        async with prefill(p, ids[:at_p], HOW) as filling:
            await filling.rest()
    if at_md:
        async with leg(md, ids[:at_md], HOW, local_prefill=True) as (call, _):
            await call.until("ready")
            await call.extend([255, 254, 253], final=True)
            await call.until("drained")
    got, _, hit = await answer(p, md, ids)
    assert got == reference(ids, HOW)
    assert hit == at_md // 16 * 16


async def test_one_prefill_feeds_relay_and_main_and_their_hand_off_is_seamless(
    p: StageApp, rld: StageApp, md: StageApp
) -> None:
    ids, want = prompt(50), reference(prompt(50), HOW)
    async with leg(rld, ids, HOW) as (relay, near), leg(md, ids, HOW) as (main, far):
        async with prefill(p, ids, HOW, [target(rld, near), target(md, far)]) as filling:
            first = await filling.until("first_token")
            await relay.resume(first.ids)
            await relay.until("tokens")
            await relay.stop()
            k = (await relay.until("stopped" if len(relay.ids) < 23 else "finished")).next_index
            await main.resume(want[:k])
            await main.until("finished")
            await filling.rest()
    assert [*first.ids, *relay.ids, *main.ids] == want


async def test_two_prefills_of_the_same_prompt_at_once_both_push_right_bytes(p: StageApp, md: StageApp) -> None:
    ids, want = prompt(100), reference(prompt(100), HOW)
    async with leg(md, ids, HOW) as (one, a), leg(md, ids, HOW) as (two, b):
        async with prefill(p, ids, HOW, [target(md, a)]) as first, prefill(p, ids, HOW, [target(md, b)]) as second:
            await one.resume(want[:1])
            await two.resume(want[:1])
            await one.until("finished")
            await two.until("finished")
            await first.rest()
            await second.rest()
    assert want[:1] + one.ids == want[:1] + two.ids == want


async def test_kv_only_samples_nothing_and_fills_the_last_block_too(p: StageApp, md: StageApp) -> None:
    ids, want = prompt(64), reference(prompt(64), HOW)
    async with leg(md, ids, HOW) as (call, transfer_id):
        async with prefill(p, ids, HOW, [target(md, transfer_id)], kv_only=True, sampling=None) as filling:
            events = await filling.rest()
            assert {event.WhichOneof("event") for event in events} <= {"started", "push_progress", "push_ended"}
            assert filling.ends()[transfer_id].blocks_sent == 4
        await call.resume(want[:10])
        await call.until("finished")
        assert want[:10] + call.ids == want


async def test_an_answer_of_one_token_ends_at_prefill(p: StageApp) -> None:
    how = sampling(1)
    async with prefill(p, prompt(20), how) as filling:
        finished = await filling.until("finished")
        assert finished.reason == common_pb2.FINISH_REASON_LENGTH
        assert finished.completion_tokens == 1
        await filling.rest()


async def test_a_target_that_refuses_does_not_harm_the_other(p: StageApp, rld: StageApp, md: StageApp) -> None:
    ids, want = prompt(50), reference(prompt(50), HOW)
    async with leg(md, ids, HOW) as (call, far):
        wrong = target(rld, "near", epoch=rld.description.epoch + 1)
        async with prefill(p, ids, HOW, [wrong, target(md, far)]) as filling:
            await call.resume((await filling.until("first_token")).ids)
            await call.until("finished")
            await filling.rest()
            ends = filling.ends()
    assert want[:1] + call.ids == want
    assert ends["near"].outcome == PushEnded.OUTCOME_ENDED
    assert ends[far].outcome == PushEnded.OUTCOME_COMMITTED


async def test_a_target_of_another_layout_is_a_failed_push_and_no_error(p: StageApp) -> None:
    async with stage(Role.MAIN, block_tokens=8) as other, leg(other, prompt(50), HOW) as (call, transfer_id):
        await call.expect("opened")
        async with prefill(p, prompt(50), HOW, [target(other, transfer_id)]) as filling:
            await filling.rest()
            end = filling.ends()[transfer_id]
    assert end.outcome == PushEnded.OUTCOME_FAILED
    assert "block_tokens" in end.detail


async def test_a_target_that_cannot_be_reached_is_a_failed_push_and_no_error(p: StageApp, md: StageApp) -> None:
    async with prefill(p, prompt(50), HOW, [target(md, "t", address="127.0.0.1:1")]) as filling:
        await filling.until("first_token")
        await filling.rest()
        end = filling.ends()["t"]
    assert end.outcome == PushEnded.OUTCOME_FAILED
    assert end.detail


async def test_a_leg_that_is_cut_ends_its_push_and_not_the_prefill(p: StageApp, rld: StageApp, md: StageApp) -> None:
    ids = prompt(50)
    async with leg(md, ids, HOW) as (call, far), leg(rld, ids, HOW) as (relay, near):
        await call.expect("opened")
        async with prefill(p, ids, HOW, [target(md, far), target(rld, near)]) as filling:
            call.cancel()
            await filling.rest()
    assert filling.ends()[near].outcome == PushEnded.OUTCOME_COMMITTED


@pytest.mark.parametrize("phase", ["queued", "computing", "pushing"])
async def test_a_router_that_leaves_a_prefill_in_any_phase_leaves_nothing(phase: str) -> None:
    async with stage(Role.PREFILL, max_running=1, token_budget=16, pace="fixed=30") as p, stage(Role.MAIN) as md:
        async with prefill(p, prompt(100, 1), HOW, [target(md, "parked-0")]) as first:
            await first.until("started")
            async with prefill(p, prompt(100, 2), HOW, [target(md, "parked-1")]) as second:
                if phase != "queued":
                    first.call.cancel()
                    await second.until("started")
                if phase == "pushing":
                    await second.until("first_token")
        await p.settle()


async def test_progress_is_told_while_bytes_are_acknowledged(p: StageApp, md: StageApp) -> None:
    ids = prompt(64)
    async with leg(md, ids, HOW) as (_, transfer_id):
        async with prefill(p, ids, HOW, [target(md, transfer_id)]) as filling:
            progress = await filling.until("push_progress")
            assert progress.payload_bytes_missing == 4 * md.description.layout.block_bytes
            await filling.rest()


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"prompt_ids": []}, grpc.StatusCode.INVALID_ARGUMENT, "prompt_ids"),
        ({"prompt_ids": [99999]}, grpc.StatusCode.INVALID_ARGUMENT, "prompt_ids"),
        ({"epoch": 3}, grpc.StatusCode.FAILED_PRECONDITION, "epoch"),
        ({"sampling": None}, grpc.StatusCode.INVALID_ARGUMENT, "sampling"),
        ({"targets": [prefill_pb2.PushTarget()]}, grpc.StatusCode.INVALID_ARGUMENT, "targets[0].address"),
        (
            {"targets": [prefill_pb2.PushTarget(address="nope", transfer_id="t", role=common_pb2.ROLE_MAIN)]},
            grpc.StatusCode.INVALID_ARGUMENT,
            "targets[0].address",
        ),
    ],
)
async def test_bad_input_is_refused_by_name(p: StageApp, changes: dict, code: grpc.StatusCode, words: str) -> None:
    async with prefill(p, prompt(20), HOW, **changes) as filling:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await filling.rest()
    assert refused.value.code() is code
    assert words in (refused.value.details() or "")


async def test_a_push_waits_for_a_leg_that_opens_later(p: StageApp, md: StageApp) -> None:
    ids = prompt(40)
    async with prefill(p, ids, HOW, [target(md, "late")]) as filling:
        first = await filling.until("first_token")
        async with leg(md, ids, HOW, transfer_id="late") as (call, _):
            await call.resume(first.ids)
            await call.until("finished")
            await filling.rest()
            assert [*first.ids, *call.ids] == reference(ids, HOW)
