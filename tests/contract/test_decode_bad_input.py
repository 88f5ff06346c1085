"""Bad input of every kind: a clear status that names field and limit, at once, and no other leg is harmed."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from kvrelay.kvcache import hashing
from kvrelay.proto.v1 import common_pb2, decode_pb2
from kvrelay.rpc import convert
from kvrelay.stage.app import StageApp
from kvrelay.types import Role
from tests.pipeline.stages import KvSource, kv_source, leg, open_message, prompt, raw_leg, reference, sampling, stage

IDS, HOW = prompt(40), sampling()
INVALID, PRECONDITION = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION


@pytest.fixture(params=[Role.RELAY, Role.MAIN])
async def app(request: pytest.FixtureRequest) -> AsyncIterator[StageApp]:
    async with stage(request.param, max_model_tokens=512) as running:
        yield running


@pytest.fixture
async def source() -> AsyncIterator[KvSource]:
    async with kv_source() as running:
        yield running


def hashes(app: StageApp, ids: list[int], salt: str = "") -> list[bytes]:
    return hashing.block_hashes(hashing.root_hash(app.description.layout, salt), ids, 16)


def unset(field: str) -> common_pb2.Sampling:
    message = convert.sampling_to_proto(HOW)
    message.ClearField(field)  # type: ignore[arg-type]
    return message


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"prompt_ids": []}, INVALID, ["prompt_ids", "empty"]),
        ({"prompt_ids": [1, 2, 9999]}, INVALID, ["prompt_ids", "9999", "263"]),
        ({"prompt_ids": prompt(512)}, INVALID, ["prompt_ids", "512", "511"]),
        ({"epoch": 1}, PRECONDITION, ["epoch", "1"]),
        ({"transfer_id": ""}, INVALID, ["transfer_id"]),
        ({"transfer_id": "t", "local_prefill": True}, INVALID, ["transfer_id", "local_prefill"]),
        ({"sampling": unset("temperature")}, INVALID, ["sampling.temperature", "must be set"]),
        ({"sampling": unset("max_tokens")}, INVALID, ["sampling.max_tokens"]),
        ({"sampling": unset("seed")}, INVALID, ["sampling.seed"]),
        ({"output_budget": 0}, INVALID, ["output_budget", "0"]),
        ({"block_hashes": [b"x" * 16, b"y" * 16]}, PRECONDITION, ["block_hashes[0]", (b"x" * 16).hex()]),
        ({"block_hashes": [b"x" * 16]}, PRECONDITION, ["block_hashes", "1 expected", "2 whole blocks"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
async def test_an_opening_that_cannot_be_served_is_refused(
    app: StageApp, changes: dict[str, Any], code: grpc.StatusCode, words: list[str]
) -> None:
    async with leg(app, IDS, HOW) as (healthy, _):
        await healthy.expect("opened")
        message = open_message(app, IDS, HOW)
        for field, value in changes.items():
            message.ClearField(field)  # type: ignore[arg-type]
            message.MergeFrom(decode_pb2.OpenLeg(**{field: value}))
        async with raw_leg(app) as call:
            await call.send(open=message)
            got, details = await call.refused()
            assert got is code
            assert all(word in details for word in words), details
        await healthy.stop()
        await healthy.expect("stopped")


async def test_block_hashes_that_agree_are_taken_and_another_salt_is_not(app: StageApp) -> None:
    async with leg(app, IDS, HOW, block_hashes=hashes(app, IDS)) as (call, _):
        await call.expect("opened")
    async with leg(app, IDS, HOW, block_hashes=hashes(app, IDS), cache_salt="tenant") as (call, _):
        assert (await call.refused())[0] is PRECONDITION


async def test_a_stream_that_does_not_begin_with_open_is_refused(app: StageApp) -> None:
    async with raw_leg(app) as call:
        await call.stop()
        assert await call.refused() == (PRECONDITION, "the first message of a leg must be open, got stop")
    async with raw_leg(app) as call:
        await call.send()
        assert (await call.refused())[1] == "the first message of a leg must be open, got none"
    async with raw_leg(app) as call:
        await call.call.done_writing()
        assert (await call.refused())[0] is PRECONDITION


async def test_a_second_open_is_refused(app: StageApp) -> None:
    async with leg(app, IDS, HOW) as (call, _):
        await call.expect("opened")
        await call.send(open=open_message(app, IDS, HOW))
        code, details = await call.refused()
        assert code is PRECONDITION
        assert "OpenLeg" in details and "LOADING" in details


async def test_an_empty_message_is_refused(app: StageApp) -> None:
    async with leg(app, IDS, HOW) as (call, _):
        await call.expect("opened")
        await call.send()
        assert (await call.refused())[0] is INVALID


async def test_a_message_that_the_state_does_not_allow_is_refused_with_both_names(app: StageApp) -> None:
    async with leg(app, IDS, HOW) as (call, _):
        await call.expect("opened")
        await call.extend([1])
        assert await call.refused() == (PRECONDITION, "Extend is not allowed while the leg is LOADING")
    async with leg(app, IDS, sampling(400), local_prefill=True) as (call, _):
        await call.resume()
        await call.until("tokens")
        await call.resume()
        assert "Resume is not allowed while the leg is DECODING" in (await call.refused())[1]


@pytest.mark.parametrize("first_index", [0, 4, 6])
async def test_a_wrong_first_index_is_refused_with_both_values(
    app: StageApp, source: KvSource, first_index: int
) -> None:
    async with leg(app, IDS, HOW) as (call, transfer_id):
        source.feed(app, transfer_id, IDS)
        await call.until("ready")
        await call.extend(reference(IDS, HOW)[:5])
        await call.expect("extended")
        await call.resume([1], first_index=first_index)
        code, details = await call.refused()
        assert code is PRECONDITION
        assert f"first_index {first_index}" in details and "next index is 5" in details


async def test_extended_ids_outside_the_vocabulary_are_refused(app: StageApp) -> None:
    async with leg(app, IDS, HOW, local_prefill=True) as (call, _):
        await call.until("ready")
        await call.extend([1, 12345])
        code, details = await call.refused()
        assert code is INVALID
        assert "12345" in details


async def test_extended_ids_beyond_the_context_are_refused(app: StageApp) -> None:
    async with leg(app, IDS, HOW, local_prefill=True) as (call, _):
        await call.until("ready")
        await call.extend(prompt(480))
        code, _ = await call.refused()
        assert code is INVALID


async def test_a_full_queue_is_resource_exhausted_with_a_retry_hint() -> None:
    async with stage(Role.MAIN, max_running=1, max_waiting=1) as app:
        # One after the other: legs that are opened at once may arrive in any order.
        async with leg(app, IDS, HOW) as (one, _):
            await one.expect("opened")
            async with leg(app, IDS, HOW) as (two, _):
                await two.in_state("QUEUED")
                async with leg(app, IDS, HOW) as (three, _):
                    assert (await three.refused())[0] is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_prompt_that_the_pool_can_never_hold_is_refused() -> None:
    async with stage(Role.RELAY, pool_tokens=128) as app, leg(app, prompt(200), HOW) as (call, _):
        code, details = await call.refused()
        assert code is INVALID
        assert "prompt_ids" in details


async def test_a_transfer_of_another_layout_is_refused_with_both_values() -> None:
    async with kv_source(block_tokens=8) as other, stage(Role.MAIN) as app:
        async with leg(app, IDS, HOW) as (call, transfer_id):
            await call.expect("opened")
            result = await other.feed(app, transfer_id, IDS).done()
            assert result.outcome == "failed"
            assert "block_tokens: 16 here, 8 there" in result.detail
