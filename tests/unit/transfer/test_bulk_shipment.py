"""What a turn gives to the socket: the same bytes however they are taken, in few system calls."""

import socket
from collections.abc import Iterable, Iterator
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.transfer import bulk_shipment, bulk_wire
from kvrelay.transfer.bulk_shipment import PIECE_BYTES, SMALL_BYTES, Shipment
from kvrelay.transfer.carrier import Frame
from kvrelay.transfer.frames import checksum

LANE = 3


class Kernel:
    """Takes as many bytes of each call as `takes` says; 0: it would block. Then all it is given."""

    def __init__(self, takes: Iterable[int] = ()) -> None:
        self.taken = bytearray()
        self.calls: list[int] = []
        self._takes: Iterator[int] = iter(takes)

    def sendmsg(self, buffers: tuple[bytes, memoryview]) -> int:
        data = b"".join(buffers)[: next(self._takes, None)]
        if not data:
            raise BlockingIOError
        self.taken += data
        self.calls.append(len(data))
        return len(data)


def frame_of(size: int, number: int = 0) -> Frame:
    return Frame("t1", number, 0, None, bytes([number % 251]) * size)


def on_the_wire(frame: Frame) -> bytes:
    return bulk_wire.frame_header(LANE, frame) + bytes(frame.payload) + bulk_wire.check(checksum(bytes(frame.payload)))


def shipped(kernel: Kernel, shipment: Shipment) -> Shipment:
    while not shipment.whole:
        try:
            shipment.write(cast(socket.socket, kernel))
        except BlockingIOError:
            continue
    return shipment


def shipment_of(frames: list[Frame], message: bytes = b"") -> Shipment:
    return Shipment(message, LANE, frames)


SIZES = st.lists(st.integers(1, 90), max_size=9)


@given(SIZES, st.lists(st.integers(0, 60)))
def test_the_bytes_are_the_same_however_many_the_kernel_takes(sizes: list[int], takes: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bulk_shipment, "PIECE_BYTES", 40)
        patch.setattr(bulk_shipment, "SMALL_BYTES", 16)
        frames = [frame_of(size, number) for number, size in enumerate(sizes)]
        kernel = Kernel(takes)
        shipment = shipped(kernel, shipment_of(frames, b"before"))
        assert bytes(kernel.taken) == b"before" + b"".join(map(on_the_wire, frames))
        assert shipment.count == len(kernel.taken)


@given(SIZES, st.lists(st.integers(1, 60), min_size=1))
def test_an_orphan_ends_what_it_has_begun_and_nothing_else(sizes: list[int], takes: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bulk_shipment, "PIECE_BYTES", 40)
        patch.setattr(bulk_shipment, "SMALL_BYTES", 16)
        payloads = [bytearray([number + 1]) * size for number, size in enumerate(sizes)]
        frames = [Frame("t1", number, 0, None, payload) for number, payload in enumerate(payloads)]
        whole = [on_the_wire(frame) for frame in frames]
        kernel = Kernel([*takes, 0])
        shipment = shipment_of(frames)
        try:
            shipment.write(cast(socket.socket, kernel))
        except BlockingIOError:
            shipment.orphan()
        for payload in payloads:  # given to another request
            payload[:] = bytes(len(payload))
        shipped(kernel, shipment)
        assert shipment.count >= len(kernel.taken)
        assert b"".join(whole).startswith(bytes(kernel.taken))
        assert len(kernel.taken) in [sum(map(len, whole[:n])) for n in range(len(whole) + 1)]


def test_small_frames_go_together_and_large_ones_in_equal_pieces() -> None:
    kernel = Kernel()
    shipped(kernel, shipment_of([frame_of(8192, number) for number in range(40)]))
    assert len(kernel.calls) == 1
    kernel = Kernel()
    size = 2 * PIECE_BYTES - 1000
    shipped(kernel, shipment_of([frame_of(size)]))
    assert len(kernel.calls) == 3  # two pieces, and the checksum
    assert abs(kernel.calls[0] - kernel.calls[1]) < 100
    assert SMALL_BYTES < kernel.calls[0] <= PIECE_BYTES


def test_a_checksum_that_is_given_is_the_one_that_is_sent() -> None:
    for size in (10, SMALL_BYTES + 1):
        kernel = Kernel()
        frame = frame_of(size)
        shipped(kernel, shipment_of([Frame("t1", 0, 0, 7, frame.payload)]))
        assert bytes(kernel.taken).endswith(bulk_wire.check(7))
