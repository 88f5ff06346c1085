"""Push messages to and from protobuf. Knows no transfer."""

from kvrelay.errors import ProtocolViolation
from kvrelay.proto.v1 import common_pb2, kv_pb2
from kvrelay.transfer.carrier import Ack, Committed, Ended, EndReason, Frame, Missing, Offer, Reply
from kvrelay.types import BlockRange

_REASONS = {
    EndReason.RELEASED: kv_pb2.Ended.REASON_RELEASED,
    EndReason.UNKNOWN: kv_pb2.Ended.REASON_UNKNOWN,
    EndReason.EPOCH: kv_pb2.Ended.REASON_EPOCH,
}
_FROM_REASON = {value: reason for reason, value in _REASONS.items()}
