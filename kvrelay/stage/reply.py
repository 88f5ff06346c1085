"""Engine events as the protos that a router reads. Knows no leg and no state."""

from kvrelay.engine import events
from kvrelay.proto.v1 import common_pb2, decode_pb2
from kvrelay.rpc import convert
from kvrelay.types import Source

_Event = decode_pb2.DecodeEvent


def opened(event: events.Admitted) -> decode_pb2.DecodeEvent:
    """KV room is reserved."""
    return _Event(opened=decode_pb2.Opened(cached_tokens=event.cached_tokens))


def ready(blocks_received: int) -> decode_pb2.DecodeEvent:
    """The prompt's KV is complete."""
    return _Event(ready=decode_pb2.Ready(blocks_received=blocks_received))


def extended(next_index: int) -> decode_pb2.DecodeEvent:
    """All ids before `next_index` but the last have KV."""
    return _Event(extended=decode_pb2.Extended(next_index=next_index))


def tokens(event: events.Tokens, source: Source) -> decode_pb2.DecodeEvent:
    """A run of sampled tokens."""
    return _Event(tokens=convert.token_run_to_proto(event.run, source))


def paused(next_index: int) -> decode_pb2.DecodeEvent:
    """The budget is used up."""
    return _Event(paused=decode_pb2.Paused(next_index=next_index))


def stopped(next_index: int) -> decode_pb2.DecodeEvent:
    """The answer to Stop."""
    return _Event(stopped=decode_pb2.Stopped(next_index=next_index))


def finished(event: events.Finished) -> decode_pb2.DecodeEvent:
    """The answer is complete."""
    return _Event(finished=finish(event))


def drained(cached_tokens: int) -> decode_pb2.DecodeEvent:
    """Prompt and output are cached."""
    return _Event(drained=decode_pb2.Drained(cached_tokens=cached_tokens))


def finish(event: events.Finished) -> common_pb2.Finished:
    """Why and after how many tokens; of any stage."""
    return common_pb2.Finished(
        reason=convert.finish_reason_to_proto(event.reason), completion_tokens=event.completion_tokens
    )
