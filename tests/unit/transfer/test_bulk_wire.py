"""Messages of a bulk connection, to bytes and back; what is no message."""

import pytest

from kvrelay.transfer import bulk_wire
from kvrelay.transfer.bulk_wire import BadMessage
from kvrelay.transfer.carrier import Frame


def body(data: bytes) -> memoryview:
    view = memoryview(data)
    assert bulk_wire.message_length(view, 0) == len(data) - 2
    return view[2:]


def test_a_frames_header_says_everything_but_the_payload_and_its_checksum() -> None:
    header = bulk_wire.frame_header(7, Frame("t1", 3, 4096, None, memoryview(bytes(500))))
    message = bulk_wire.read_message(body(header)).frame
    assert (message.lane, message.payload_bytes) == (7, 500)
    about = message.frame
    assert (about.transfer_id, about.block, about.offset, about.crc32c, about.payload) == ("t1", 3, 4096, 0, b"")


@pytest.mark.parametrize("crc32c", [0, 1, 0xFFFFFFFF])
def test_a_check_is_always_as_long(crc32c: int) -> None:
    check = bulk_wire.check(crc32c)
    assert len(check) == bulk_wire.CHECK_BYTES
    message = bulk_wire.read_message(body(check))
    assert (message.WhichOneof("message"), message.check) == ("check", crc32c)


def test_attach_and_detach_name_their_lane() -> None:
    attach = bulk_wire.read_message(body(bulk_wire.attach(5, b"secret"))).attach
    assert (attach.lane, attach.token) == (5, b"secret")
    assert bulk_wire.read_message(body(bulk_wire.detach(5))).detach == 5


def test_acknowledgements_are_read_as_they_come_in_any_pieces() -> None:
    data = bulk_wire.ack(1, 10) + bulk_wire.ack(2, 1 << 40)
    inbox, read = bytearray(), []
    for byte in data:
        inbox.append(byte)
        read += [(ack.lane, ack.payload_bytes) for ack in bulk_wire.read_acks(inbox)]
    assert read == [(1, 10), (2, 1 << 40)]
    assert not inbox


def test_a_length_beyond_the_limit_is_refused_before_its_message_is_there() -> None:
    with pytest.raises(BadMessage, match="1025"):
        bulk_wire.message_length(memoryview(b"\x00\x04\x01"), 1)
    with pytest.raises(BadMessage):
        bulk_wire.frame_header(1, Frame("x" * 1024, 0, 0, 0, b""))


def test_noise_is_no_message() -> None:
    with pytest.raises(BadMessage):
        bulk_wire.read_message(memoryview(b"\xff\xff\xff"))
    with pytest.raises(BadMessage):
        bulk_wire.read_acks(bytearray(b"\x00\x03\xff\xff\xff"))
