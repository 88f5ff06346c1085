"""What tests of both ends of a bulk connection need."""

from kvrelay.transfer.bulk_server import BulkServer
from kvrelay.transfer.carrier import Frame
from kvrelay.transfer.frames import checksum
from tests.unit.transfer.rig import Rig

BLOCK = 8192


def doors_of(rig: Rig) -> BulkServer:
    assert isinstance(rig.receiver.doors, BulkServer)
    return rig.receiver.doors


def frame_of(rig: Rig, block: int, *, offset: int = 0, length: int = BLOCK, damage: int = 0) -> Frame:
    payload = bytes(rig.source.read(block)[offset : offset + length])
    return Frame("t1", block, offset, checksum(payload) ^ damage, payload)
