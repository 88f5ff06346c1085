"""The one place where protos become types and types become protos. Knows no service; opens nothing.

`x_to_proto(value)` cannot fail; `x_from_proto(message, field)` raises InvalidRequest, with `field` as the path of what
is wrong.
"""

from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, TypeVar, cast

from kvrelay.errors import InvalidRequest
from kvrelay.proto.v1 import common_pb2, prefill_pb2, router_pb2, stage_pb2
from kvrelay.rpc.sampling import sampling_from_client, sampling_from_proto, sampling_to_proto, token_ids_from_client
from kvrelay.types import (
    FinishReason,
    HandoffMode,
    KvTarget,
    LayoutFingerprint,
    LinkLoad,
    Logprobs,
    Pipeline,
    Role,
    Source,
    StageDescription,
    StageLoad,
    TokenRun,
)

__all__ = ["sampling_from_client", "sampling_from_proto", "sampling_to_proto", "token_ids_from_client"]

_E = TypeVar("_E", Role, Source, FinishReason, Pipeline, HandoffMode)

_ROLES = {
    Role.PREFILL: common_pb2.ROLE_PREFILL,
    Role.RELAY: common_pb2.ROLE_RELAY,
    Role.MAIN: common_pb2.ROLE_MAIN,
}
_SOURCES = {
    Source.PREFILL: common_pb2.SOURCE_PREFILL,
    Source.RELAY: common_pb2.SOURCE_RELAY,
    Source.MAIN: common_pb2.SOURCE_MAIN,
}
_REASONS = {
    FinishReason.EOS: common_pb2.FINISH_REASON_EOS,
    FinishReason.STOP_TOKEN: common_pb2.FINISH_REASON_STOP_TOKEN,
    FinishReason.STOP_STRING: common_pb2.FINISH_REASON_STOP_STRING,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
}
_PIPELINES = {
    Pipeline.P_RLD_MD: router_pb2.PIPELINE_P_RLD_MD,
    Pipeline.P_MD: router_pb2.PIPELINE_P_MD,
    Pipeline.P_RLD: router_pb2.PIPELINE_P_RLD,
    Pipeline.MD: router_pb2.PIPELINE_MD,
}
_HANDOFF_MODES = {
    HandoffMode.DYNAMIC: router_pb2.HANDOFF_MODE_DYNAMIC,
    HandoffMode.ONE_SHOT: router_pb2.HANDOFF_MODE_ONE_SHOT,
    HandoffMode.CATCH_UP: router_pb2.HANDOFF_MODE_CATCH_UP,
}


def _member(table: Mapping[_E, Any], number: int, field: str) -> _E:
    for member, known in table.items():
        if known == number:
            return member
    names = ", ".join(table)
    raise InvalidRequest(
        field, f"must be one of {names}, got {'nothing' if number == 0 else f'unknown value {number}'}"
    )


def role_from_proto(number: int, field: str = "role") -> Role:
    """InvalidRequest: unspecified or unknown."""
    return _member(_ROLES, number, field)


def finish_reason_to_proto(reason: FinishReason) -> "common_pb2.FinishReason.ValueType":
    """-> the enum's number."""
    return _REASONS[reason]


def finish_reason_from_proto(number: int, field: str = "reason") -> FinishReason:
    """InvalidRequest: unspecified or unknown."""
    return _member(_REASONS, number, field)


def pipeline_to_proto(pipeline: Pipeline) -> "router_pb2.Pipeline.ValueType":
    """-> the enum's number."""
    return _PIPELINES[pipeline]


def pipeline_from_client(number: int, field: str = "pipeline") -> Pipeline | None:
    """None: not forced. InvalidRequest: unknown."""
    return None if number == 0 else _member(_PIPELINES, number, field)


def handoff_mode_to_proto(mode: HandoffMode | None) -> "router_pb2.HandoffMode.ValueType":
    """-> the enum's number; None: unspecified."""
    return router_pb2.HANDOFF_MODE_UNSPECIFIED if mode is None else _HANDOFF_MODES[mode]


def handoff_mode_from_proto(number: int, field: str = "handoff_mode") -> HandoffMode | None:
    """None: unspecified (no hand-off, or not forced). InvalidRequest: unknown."""
    return None if number == 0 else _member(_HANDOFF_MODES, number, field)


def logprobs_to_proto(logprobs: Logprobs) -> common_pb2.Logprobs:
    """Of one position."""
    top = [common_pb2.TokenLogprob(token_id=token, logprob=value) for token, value in logprobs.top]
    return common_pb2.Logprobs(chosen=logprobs.chosen, top=top)


def logprobs_from_proto(message: common_pb2.Logprobs) -> Logprobs:
    """Of one position."""
    return Logprobs(message.chosen, tuple((item.token_id, item.logprob) for item in message.top))


def token_run_to_proto(run: TokenRun, source: Source) -> common_pb2.TokenChunk:
    """A run and who sampled it."""
    chunk = common_pb2.TokenChunk()
    fill_tokens(chunk, run.first_index, run.ids, run.logprobs, source)
    return chunk


def fill_tokens(
    chunk: common_pb2.TokenChunk, first_index: int, ids: Sequence[int], logprobs: Sequence[Logprobs], source: Source
) -> None:
    """As token_run_to_proto, of a run in parts, into an empty message that is part of another."""
    chunk.first_index, chunk.source = first_index, _SOURCES[source]
    chunk.ids.extend(ids)
    if logprobs:
        chunk.logprobs.extend([logprobs_to_proto(item) for item in logprobs])


def token_run_from_proto(message: common_pb2.TokenChunk, field: str = "tokens") -> TokenRun:
    """The run without its source. InvalidRequest: logprobs are neither absent nor one per id."""
    ids = tuple(message.ids)
    found = message.logprobs
    if not found:
        return TokenRun(message.first_index, ids)
    if len(found) != len(ids):
        raise InvalidRequest(f"{field}.logprobs", f"must be empty or one per id, got {len(found)} for {len(ids)} ids")
    return TokenRun(message.first_index, ids, tuple(map(logprobs_from_proto, found)))


def layout_to_proto(layout: LayoutFingerprint) -> common_pb2.LayoutFingerprint:
    """All fields."""
    return common_pb2.LayoutFingerprint(**{name: getattr(layout, name) for name in LayoutFingerprint.__slots__})


def layout_from_proto(message: common_pb2.LayoutFingerprint) -> LayoutFingerprint:
    """All fields, whatever their values: what differs is refused by `difference`."""
    return LayoutFingerprint(**{name: getattr(message, name) for name in LayoutFingerprint.__slots__})


def kv_target_to_proto(target: KvTarget) -> prefill_pb2.PushTarget:
    """All fields."""
    return prefill_pb2.PushTarget(
        instance_id=target.instance_id,
        address=target.address,
        epoch=target.epoch,
        transfer_id=target.transfer_id,
        role=_ROLES[target.role],
    )


def kv_target_from_proto(message: prefill_pb2.PushTarget, field: str = "targets") -> KvTarget:
    """InvalidRequest: no address, no transfer id, or no role."""
    for name in ("address", "transfer_id"):
        if not getattr(message, name):
            raise InvalidRequest(f"{field}.{name}", "must not be empty")
    return KvTarget(
        instance_id=message.instance_id,
        address=message.address,
        epoch=message.epoch,
        transfer_id=message.transfer_id,
        role=role_from_proto(message.role, f"{field}.role"),
    )


def load_to_proto(load: StageLoad) -> stage_pb2.LoadReport:
    """All fields."""
    report = stage_pb2.LoadReport(**{name: getattr(load, name) for name in StageLoad.__slots__ if name != "links"})
    for link in load.links:
        report.links.add(
            peer=link.peer,
            goodput_bytes_per_s=link.goodput_bytes_per_s,
            pending_bytes=link.pending_bytes,
            pushes=link.pushes,
        )
    return report


_load_fields = attrgetter(*StageLoad.__slots__)
_LINKS = StageLoad.__slots__.index("links")


class _Links(Sequence[LinkLoad]):
    """A report's links as they are in the message: they have the fields of LinkLoad.

    To make 99 LinkLoads takes 290 us, and nearly none is looked at before the next report comes.
    """

    __slots__ = ("_links",)

    def __init__(self, links: Sequence[stage_pb2.LinkReport]) -> None:
        self._links = cast(Sequence[LinkLoad], links)

    def __len__(self) -> int:
        return len(self._links)

    def __getitem__(self, index: Any) -> Any:
        return self._links[index]

    def __iter__(self) -> Iterator[LinkLoad]:
        return iter(self._links)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(map(_plain_link, self)) == tuple(map(_plain_link, other))


def _plain_link(link: LinkLoad) -> LinkLoad:
    return LinkLoad(link.peer, link.goodput_bytes_per_s, link.pending_bytes, tuple(link.pushes))


def load_from_proto(message: stage_pb2.LoadReport) -> StageLoad:
    """All fields. The message is kept for its links."""
    values = list(_load_fields(message))
    values[_LINKS] = _Links(message.links)
    return StageLoad(*values)


_SPECIAL = ("role", "layout", "eos_token_ids")
_PLAIN = tuple(name for name in StageDescription.__slots__ if name not in _SPECIAL)


def description_to_proto(description: StageDescription) -> stage_pb2.StageInfo:
    """All fields, and the block size that follows from the layout."""
    return stage_pb2.StageInfo(
        **{name: getattr(description, name) for name in _PLAIN},
        role=_ROLES[description.role],
        layout=layout_to_proto(description.layout),
        block_bytes=description.layout.block_bytes,
        eos_token_ids=description.eos_token_ids,
    )


def description_from_proto(message: stage_pb2.StageInfo, field: str = "stage") -> StageDescription:
    """InvalidRequest: no instance id or role."""
    if not message.instance_id:
        raise InvalidRequest(f"{field}.instance_id", "must not be empty")
    return StageDescription(
        **{name: getattr(message, name) for name in _PLAIN},
        role=role_from_proto(message.role, f"{field}.role"),
        layout=layout_from_proto(message.layout),
        eos_token_ids=tuple(message.eos_token_ids),
    )
