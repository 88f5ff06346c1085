"""What goes over a bulk connection, to and from bytes: each message behind its length. Knows no socket, no transfer."""

from google.protobuf.message import DecodeError

from kvrelay.proto.v1 import kv_pb2
from kvrelay.transfer.carrier import Frame

LENGTH_BYTES = 2
"""Before each message, big-endian."""
MAX_MESSAGE_BYTES = 1024
"""Without a frame's payload."""

_CHECK = (5).to_bytes(LENGTH_BYTES, "big") + bytes([kv_pb2.BulkMessage.CHECK_FIELD_NUMBER << 3 | 5])
"""A `check` but for its last four bytes, the number."""
CHECK_BYTES = len(_CHECK) + 4
"""Of a payload's checksum, with its length."""


class BadMessage(Exception):
    """Not what this protocol allows: the connection is of no more use."""


def attach(lane: int, token: bytes) -> bytes:
    """The first message of a lane on a connection."""
    return _measured(kv_pb2.BulkMessage(attach=kv_pb2.BulkAttach(lane=lane, token=token)))


def detach(lane: int) -> bytes:
    """The last message of a lane on a connection."""
    return _measured(kv_pb2.BulkMessage(detach=lane))


def frame_header(lane: int, frame: Frame) -> bytes:
    """What goes before a frame's payload; behind it goes `check`."""
    message = kv_pb2.BulkMessage()  # filled in place: half the time of building it from its parts
    bulk = message.frame
    bulk.lane = lane
    bulk.payload_bytes = len(frame.payload)
    about = bulk.frame
    about.transfer_id = frame.transfer_id
    about.block = frame.block
    about.offset = frame.offset
    return _measured(message)


def check(crc32c: int) -> bytes:
    """What goes behind a frame's payload: `CHECK_BYTES`."""
    return _CHECK + crc32c.to_bytes(4, "little")


def ack(lane: int, payload_bytes: int) -> bytes:
    """An acknowledgement."""
    return _measured(kv_pb2.BulkAck(lane=lane, payload_bytes=payload_bytes))


def message_length(data: memoryview, at: int) -> int:
    """Length of the message whose two bytes of length, not counted, stand at `at`. BadMessage: more than is allowed."""
    length: int = data[at] << 8 | data[at + 1]
    if length > MAX_MESSAGE_BYTES:
        raise BadMessage(f"a message of {length} bytes")
    return length


def read_message(data: memoryview) -> kv_pb2.BulkMessage:
    """A sender's message, without its length. BadMessage: it is none."""
    try:
        return kv_pb2.BulkMessage.FromString(bytes(data))
    except DecodeError as error:
        raise BadMessage("no message") from error


def read_check(data: memoryview) -> int:
    """The number in a `check`, its length included. BadMessage: it is none."""
    if len(data) != CHECK_BYTES or data[: len(_CHECK)] != _CHECK:
        raise BadMessage("a payload without its checksum")
    return int.from_bytes(data[len(_CHECK) :], "little")


def read_acks(data: bytearray) -> list[kv_pb2.BulkAck]:
    """Takes all whole acknowledgements from the beginning of `data`. BadMessage: something else is there."""
    acks: list[kv_pb2.BulkAck] = []
    at = 0
    with memoryview(data) as view:
        while (start := at + LENGTH_BYTES) <= len(data):
            end = start + message_length(view, at)
            if len(data) < end:
                break
            try:
                acks.append(kv_pb2.BulkAck.FromString(bytes(view[start:end])))
            except DecodeError as error:
                raise BadMessage("no acknowledgement") from error
            at = end
    del data[:at]
    return acks


def _measured(message: kv_pb2.BulkMessage | kv_pb2.BulkAck) -> bytes:
    body = message.SerializeToString()
    if len(body) > MAX_MESSAGE_BYTES:
        raise BadMessage(f"a message of {len(body)} bytes, of {MAX_MESSAGE_BYTES} at most")
    return len(body).to_bytes(LENGTH_BYTES, "big") + body
