"""Offers and frames of a rig's transfer, made by hand."""

from kvrelay.transfer.carrier import Frame, Offer
from kvrelay.transfer.frames import checksum
from tests.unit.transfer.rig import EPOCH, Rig


def offer_of(rig: Rig, transfer_id: str = "t1") -> Offer:
    return Offer(transfer_id, "r1", rig.layout, rig.blocks, rig.layout.block_bytes, EPOCH, 0)


def frame_of(rig: Rig, block: int, *, transfer_id: str = "t1", offset: int = 0, length: int | None = None) -> Frame:
    payload = bytes(rig.source.read(block)[offset : None if length is None else offset + length])
    return Frame(transfer_id, block, offset, checksum(payload), payload)
