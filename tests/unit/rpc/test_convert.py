"""Everything that crosses the edge comes back as it was."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.errors import InvalidRequest
from kvrelay.proto.v1 import common_pb2, prefill_pb2, stage_pb2
from kvrelay.rpc import convert
from kvrelay.types import (
    FinishReason,
    HandoffMode,
    KvTarget,
    LayoutFingerprint,
    LinkLoad,
    Logprobs,
    Pipeline,
    Role,
    Sampling,
    Source,
    StageDescription,
    StageLoad,
    TokenRun,
)

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
real = st.floats(allow_nan=False)
text = st.text(max_size=20)
positive = st.floats(0, 1e6, exclude_min=True)
max_tokens = st.shared(st.integers(1, 2**32 - 1), key="max_tokens")

samplings = st.builds(
    Sampling,
    seed=u64,
    max_tokens=max_tokens,
    temperature=st.floats(0, 1e6),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=u32,
    min_p=st.floats(0, 1),
    repetition_penalty=positive,
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    min_tokens=max_tokens.flatmap(lambda n: st.integers(0, n)),
    ignore_eos=st.booleans(),
    stop_token_ids=st.lists(u32, max_size=64).map(tuple),
    logprobs=st.none() | st.integers(0, 20),
)
logprobs = st.builds(Logprobs, chosen=real, top=st.lists(st.tuples(u32, real), max_size=3).map(tuple))
layouts = st.builds(
    LayoutFingerprint,
    weights=text,
    layers=u32,
    kv_heads=u32,
    head_dim=u32,
    block_tokens=u32,
    dtype=st.sampled_from(["float64", "float32", "bfloat16"]),
    rope=text,
    schema_version=u32,
)
small_layouts = layouts.map(
    lambda layout: dataclasses.replace(layout, layers=30, kv_heads=3, head_dim=64, block_tokens=16)
)
descriptions = st.builds(
    StageDescription,
    instance_id=st.text(min_size=1, max_size=20),
    epoch=u64,
    role=st.sampled_from(Role),
    site=text,
    address=text,
    model=text,
    tokenizer=text,
    layout=small_layouts,
    vocab_size=u32,
    max_model_tokens=u32,
    pool_blocks=u32,
    max_running=u32,
    eos_token_ids=st.lists(u32, max_size=3).map(tuple),
    device=text,
    pace=text,
    version=text,
    prefix_cache=st.booleans(),
)
loads = st.builds(
    StageLoad,
    running=u32,
    waiting=u32,
    max_running=u32,
    blocks_total=u32,
    blocks_free=u32,
    blocks_cached=u32,
    queued_tokens=u64,
    prefill_tokens_per_s=real,
    step_ms=real,
    draining=st.booleans(),
    links=st.lists(st.builds(LinkLoad, text, real, u64), max_size=3).map(tuple),
    index_connected=st.booleans(),
    steps=u64,
    steps_overrun=u64,
)
targets = st.builds(
    KvTarget,
    instance_id=text,
    address=st.text(min_size=1, max_size=20),
    epoch=u64,
    transfer_id=st.text(min_size=1, max_size=20),
    role=st.sampled_from(Role),
)


def over_the_wire(message: Any) -> Any:
    return type(message).FromString(message.SerializeToString())


@given(samplings)
def test_sampling_crosses_unchanged(sampling: Sampling) -> None:
    assert convert.sampling_from_proto(over_the_wire(convert.sampling_to_proto(sampling))) == sampling


@given(logprobs)
def test_logprobs_cross_unchanged(value: Logprobs) -> None:
    assert convert.logprobs_from_proto(over_the_wire(convert.logprobs_to_proto(value))) == value


@given(u32, st.lists(st.tuples(u32, logprobs), max_size=4), st.booleans(), st.sampled_from(Source))
def test_a_token_run_and_its_source_cross_unchanged(
    first: int, tokens: list[tuple[int, Logprobs]], with_logprobs: bool, source: Source
) -> None:
    values = tuple(logprob for _, logprob in tokens) if with_logprobs else ()
    run = TokenRun(first, tuple(token for token, _ in tokens), values)
    message = over_the_wire(convert.token_run_to_proto(run, source))
    assert convert.token_run_from_proto(message) == run
    assert common_pb2.Source.Name(message.source) == f"SOURCE_{source.name}"


@given(layouts)
def test_a_layout_crosses_unchanged(layout: LayoutFingerprint) -> None:
    assert convert.layout_from_proto(over_the_wire(convert.layout_to_proto(layout))) == layout


@given(descriptions)
def test_a_description_crosses_unchanged_and_says_its_block_size(description: StageDescription) -> None:
    message = over_the_wire(convert.description_to_proto(description))
    assert convert.description_from_proto(message) == description
    assert message.block_bytes == description.layout.block_bytes


@given(loads)
def test_a_load_report_crosses_unchanged(load: StageLoad) -> None:
    assert convert.load_from_proto(over_the_wire(convert.load_to_proto(load))) == load


@given(targets)
def test_a_kv_target_crosses_unchanged(target: KvTarget) -> None:
    assert convert.kv_target_from_proto(over_the_wire(convert.kv_target_to_proto(target))) == target


@pytest.mark.parametrize(
    ("enum", "to_proto", "from_proto"),
    [
        (FinishReason, convert.finish_reason_to_proto, convert.finish_reason_from_proto),
        (Pipeline, convert.pipeline_to_proto, convert.pipeline_from_client),
        (HandoffMode, convert.handoff_mode_to_proto, convert.handoff_mode_from_proto),
    ],
)
def test_every_member_of_an_enum_crosses_and_unknown_numbers_are_refused(
    enum: Any, to_proto: Callable[[Any], Any], from_proto: Callable[[Any, str], Any]
) -> None:
    for member in enum:
        assert from_proto(to_proto(member), "x") is member
    with pytest.raises(InvalidRequest, match=r"open\.kind: must be one of .*, got unknown value 99"):
        from_proto(99, "open.kind")


@pytest.mark.parametrize(
    "from_proto",
    [
        convert.role_from_proto,
        convert.finish_reason_from_proto,
    ],
)
def test_an_unspecified_enum_is_refused_by_field(from_proto: Callable[[int, str], Any]) -> None:
    with pytest.raises(InvalidRequest, match=r"open\.kind: must be one of .*, got nothing"):
        from_proto(0, "open.kind")


def test_an_unforced_pipeline_or_mode_is_none() -> None:
    assert convert.pipeline_from_client(0) is None
    assert convert.handoff_mode_from_proto(0) is None
    assert convert.handoff_mode_from_proto(convert.handoff_mode_to_proto(None)) is None


def test_messages_with_holes_are_refused_by_field() -> None:
    with pytest.raises(InvalidRequest, match=r"targets\[1\]\.address: must not be empty"):
        convert.kv_target_from_proto(prefill_pb2.PushTarget(transfer_id="t"), "targets[1]")
    with pytest.raises(InvalidRequest, match=r"targets\.transfer_id"):
        convert.kv_target_from_proto(prefill_pb2.PushTarget(address="h:1"))
    with pytest.raises(InvalidRequest, match=r"targets\.role"):
        convert.kv_target_from_proto(prefill_pb2.PushTarget(address="h:1", transfer_id="t"))
    with pytest.raises(InvalidRequest, match=r"stage\.instance_id"):
        convert.description_from_proto(stage_pb2.StageInfo())
    chunk = common_pb2.TokenChunk(ids=[1, 2], logprobs=[common_pb2.Logprobs()])
    with pytest.raises(InvalidRequest, match=r"tokens\.logprobs: must be empty or one per id, got 1 for 2 ids"):
        convert.token_run_from_proto(chunk)


@pytest.mark.parametrize("name", [n for n in Sampling.__slots__ if n not in ("logprobs", "stop_token_ids")])
def test_a_stage_refuses_sampling_with_an_unset_field(name: str) -> None:
    message = convert.sampling_to_proto(Sampling(seed=1, max_tokens=1))
    message.ClearField(name)
    with pytest.raises(InvalidRequest, match=rf"sampling\.{name}: must be set"):
        convert.sampling_from_proto(message)
