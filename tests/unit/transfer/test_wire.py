"""Frames to bytes and back: as protobuf has it, whoever wrote them, and without copies."""

import contextlib

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.proto.v1 import kv_pb2
from kvrelay.transfer import wire
from kvrelay.transfer.carrier import Frame, Offer
from tests.unit.transfer.rig import layout_of

frames = st.builds(
    Frame,
    st.text(max_size=40),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**32 - 1),
    st.binary(max_size=600),
)


@given(frames)
def test_a_frame_is_what_protobuf_would_have_written(frame: Frame) -> None:
    about = kv_pb2.PushRequest.FromString(wire.write_frame(frame)).frame
    assert Frame(about.transfer_id, about.block, about.offset, about.crc32c, about.payload) == frame


@given(frames)
def test_a_frame_is_read_back_and_so_is_one_that_protobuf_wrote(frame: Frame) -> None:
    about = kv_pb2.Frame(
        transfer_id=frame.transfer_id,
        block=frame.block,
        offset=frame.offset,
        crc32c=frame.crc32c,
        payload=bytes(frame.payload),
    )
    assert wire.read_request(wire.write_frame(frame)) == frame
    assert wire.read_request(kv_pb2.PushRequest(frame=about).SerializeToString()) == frame


def test_a_large_payload_is_not_copied_when_it_is_read() -> None:
    data = wire.write_frame(Frame("t", 1, 2, 3, memoryview(bytes(300_000))))
    frame = wire.read_request(data)
    assert isinstance(frame, Frame)
    assert isinstance(frame.payload, memoryview)
    assert frame.payload.obj is data


def test_an_offer_stays_a_message() -> None:
    offer = Offer("t1", "r1", layout_of(8), 3, 8192, 7, 1, bulk=True)
    request = wire.read_request(wire.write_offer(offer).SerializeToString())
    assert isinstance(request, kv_pb2.PushRequest)
    assert wire.read_offer(request.offer) == offer


@given(st.binary(max_size=60))
def test_noise_is_an_error_or_a_message_and_nothing_else(noise: bytes) -> None:
    for data in (noise, b"\x12" + noise):
        with contextlib.suppress(DecodeError):
            wire.read_request(data)


def test_a_frame_that_is_cut_short_is_an_error() -> None:
    data = wire.write_frame(Frame("t", 1, 2, 3, bytes(1000)))
    for end in (1, 3, 10, 500, len(data) - 1):
        with pytest.raises(DecodeError):
            wire.read_request(data[:end])
