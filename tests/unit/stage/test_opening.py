"""What a router may expect of a stage."""

import pytest

from kvrelay.errors import ProtocolViolation
from kvrelay.kvcache import hashing
from kvrelay.stage.opening import check_epoch, check_hashes
from kvrelay.types import LayoutFingerprint, Role, StageDescription

LAYOUT = LayoutFingerprint("w", 2, 2, 8, 4, "float64", "r")
STAGE = StageDescription("m1", 7, Role.MAIN, "b", "", "tiny", "t", LAYOUT, 256, 512, 32, 4, (2,))
IDS = list(range(11))


def hashes(salt: str = "") -> list[bytes]:
    return hashing.block_hashes(hashing.root_hash(LAYOUT, salt), IDS, 4)


def test_another_epoch_is_refused_with_both_values() -> None:
    check_epoch(STAGE, 7)
    with pytest.raises(ProtocolViolation, match="6 expected, but m1 has 7"):
        check_epoch(STAGE, 6)


def test_hashes_must_agree_if_any_are_given() -> None:
    check_hashes(STAGE, "", IDS, [])
    check_hashes(STAGE, "a", IDS, hashes("a"))
    with pytest.raises(ProtocolViolation, match=r"block_hashes\[0\]"):
        check_hashes(STAGE, "a", IDS, hashes("b"))
    with pytest.raises(ProtocolViolation, match="1 expected, but the prompt has 2"):
        check_hashes(STAGE, "", IDS, hashes()[:1])
