"""Push messages to and from protobuf. Knows no transfer."""

from kvrelay.proto.v1 import common_pb2, kv_pb2
from kvrelay.rpc.convert import layout_from_proto, layout_to_proto
from kvrelay.transfer.carrier import Ack, BulkDoor, Committed, Ended, EndReason, Frame, Missing, Offer, Reply
from kvrelay.transfer.frames import checksum
from kvrelay.types import BlockRange

GRPC_PREFIX_BYTES = 5
"""Before each message in its stream: compressed flag and length."""

_LENGTH = 2
"""Wire type of protobuf."""
_FRAME = bytes([kv_pb2.PushRequest.FRAME_FIELD_NUMBER << 3 | _LENGTH])
_PAYLOAD = bytes([kv_pb2.Frame.PAYLOAD_FIELD_NUMBER << 3 | _LENGTH])

_REASONS = {
    EndReason.RELEASED: kv_pb2.Ended.REASON_RELEASED,
    EndReason.UNKNOWN: kv_pb2.Ended.REASON_UNKNOWN,
    EndReason.EPOCH: kv_pb2.Ended.REASON_EPOCH,
}
_FROM_REASON = {value: reason for reason, value in _REASONS.items()}


def write_offer(offer: Offer) -> kv_pb2.PushRequest:
    """An Offer as the first message of a stream."""
    return kv_pb2.PushRequest(
        offer=kv_pb2.Offer(
            transfer_id=offer.transfer_id,
            request_id=offer.request_id,
            layout=layout_to_proto(offer.layout),
            blocks=offer.blocks,
            block_bytes=offer.block_bytes,
            epoch=offer.epoch,
            lane=offer.lane,
            bulk=offer.bulk,
        )
    )


def read_offer(message: kv_pb2.Offer) -> Offer:
    """The inverse of `write_offer`."""
    return Offer(
        transfer_id=message.transfer_id,
        request_id=message.request_id,
        layout=layout_from_proto(message.layout),
        blocks=message.blocks,
        block_bytes=message.block_bytes,
        epoch=message.epoch,
        lane=message.lane,
        bulk=message.bulk,
    )


def write_frame(frame: Frame) -> bytes:
    """A PushRequest with this frame, serialized.

    As protobuf would read it; but the payload is copied once instead of three times, and stands first.
    """
    crc32c = checksum(frame.payload) if frame.crc32c is None else frame.crc32c
    about = kv_pb2.Frame(
        transfer_id=frame.transfer_id, block=frame.block, offset=frame.offset, crc32c=crc32c
    ).SerializeToString()
    lead = _PAYLOAD + _varint(len(frame.payload))
    whole = _FRAME + _varint(len(lead) + len(frame.payload) + len(about))
    return b"".join((whole, lead, frame.payload, about))


def read_request(data: bytes) -> kv_pb2.PushRequest | Frame:
    """The inverse of `write_frame`, its payload a view of `data`; any other PushRequest as it is. DecodeError."""
    if (found := _payload_of(data)) is not None:
        start, end = found
        about = kv_pb2.Frame.FromString(data[end:])
        if not about.payload:
            return Frame(about.transfer_id, about.block, about.offset, about.crc32c, memoryview(data)[start:end])
    request = kv_pb2.PushRequest.FromString(data)
    if request.WhichOneof("message") != "frame":
        return request
    about = request.frame
    return Frame(about.transfer_id, about.block, about.offset, about.crc32c, about.payload)


def _payload_of(data: bytes) -> tuple[int, int] | None:
    """Where a frame's payload begins and ends; None: not as `write_frame` has it."""
    if not data.startswith(_FRAME):
        return None
    try:
        length, start = _read_varint(data, len(_FRAME))
        if start + length != len(data) or not data.startswith(_PAYLOAD, start):
            return None
        size, payload = _read_varint(data, start + len(_PAYLOAD))
    except IndexError:
        return None
    return (payload, payload + size) if payload + size <= len(data) else None


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at `at`, and where it ends. IndexError: it does not, or is too long to be one."""
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise IndexError("a varint of more than ten bytes")


def write_reply(reply: Reply) -> kv_pb2.PushReply:
    """Any reply of the receiver."""
    match reply:
        case Missing(ranges, size, door):
            pairs = [common_pb2.BlockRange(first=r.first, end=r.end) for r in ranges]
            way = None if door is None else kv_pb2.BulkDoor(address=door.address, lane=door.lane, token=door.token)
            return kv_pb2.PushReply(missing=kv_pb2.Missing(ranges=pairs, bytes=size, door=way))
        case Ack(payload_bytes):
            return kv_pb2.PushReply(ack=kv_pb2.Ack(payload_bytes=payload_bytes))
        case Committed(blocks, received):
            return kv_pb2.PushReply(committed=kv_pb2.Committed(blocks=blocks, blocks_received=received))
        case Ended(reason):
            return kv_pb2.PushReply(ended=kv_pb2.Ended(reason=_REASONS[reason]))


def read_reply(message: kv_pb2.PushReply) -> Reply:
    """The inverse of `write_reply`. ValueError for a message that says nothing known."""
    match message.WhichOneof("message"):
        case "missing":
            missing = message.missing
            ranges = tuple(BlockRange(r.first, r.end) for r in missing.ranges)
            way = missing.door if missing.HasField("door") else None
            door = None if way is None else BulkDoor(way.address, way.lane, way.token)
            return Missing(ranges, missing.bytes, door)
        case "ack":
            return Ack(message.ack.payload_bytes)
        case "committed":
            return Committed(message.committed.blocks, message.committed.blocks_received)
        case "ended":
            return Ended(_FROM_REASON.get(message.ended.reason, EndReason.RELEASED))
        case other:
            raise ValueError(f"push reply of unknown kind {other!r}")
