"""Block hashes: whole blocks, chained, independent of the process."""

import dataclasses
import hashlib
import struct
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.kvcache.hashing import block_hashes, root_hash
from kvrelay.types import LayoutFingerprint

LAYOUT = LayoutFingerprint(
    weights="w", layers=2, kv_heads=2, head_dim=8, block_tokens=4, dtype="float32", rope="default theta=10000.0"
)
ids_lists = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def test_a_hash_is_blake2b_128_over_parent_and_little_endian_ids() -> None:
    root = root_hash(LAYOUT, "tenant")
    first = hashlib.blake2b(root + struct.pack("<4I", 1, 2, 3, 4), digest_size=16).digest()
    second = hashlib.blake2b(first + struct.pack("<4I", 5, 6, 7, 8), digest_size=16).digest()
    assert block_hashes(root, [1, 2, 3, 4, 5, 6, 7, 8, 9], 4) == [first, second]


@pytest.mark.parametrize(("length", "blocks"), [(0, 0), (1, 0), (3, 0), (4, 1), (5, 1), (7, 1), (8, 2), (9, 2)])
def test_only_whole_blocks_have_a_hash(length: int, blocks: int) -> None:
    assert len(block_hashes(root_hash(LAYOUT), list(range(length)), 4)) == blocks


@settings(deadline=None)
@given(ids_lists, ids_lists)
def test_hashes_agree_exactly_as_far_as_whole_blocks_of_ids_agree(ours: list[int], theirs: list[int]) -> None:
    root = root_hash(LAYOUT)
    for index, (one, other) in enumerate(zip(block_hashes(root, ours, 4), block_hashes(root, theirs, 4), strict=False)):
        end = (index + 1) * 4
        assert (one == other) == (ours[:end] == theirs[:end])


@settings(deadline=None)
@given(ids_lists, st.integers(0, 5))
def test_a_chain_can_be_continued_from_any_block(ids: list[int], known: int) -> None:
    root = root_hash(LAYOUT)
    whole = block_hashes(root, ids, 4)
    known = min(known, len(whole))
    parent = whole[known - 1] if known else root
    assert whole[:known] + block_hashes(parent, ids[known * 4 :], 4) == whole


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(LAYOUT)])
def test_each_field_of_the_layout_changes_the_root(field: str) -> None:
    value = getattr(LAYOUT, field)
    other = dataclasses.replace(LAYOUT, **{field: value + 1 if isinstance(value, int) else value + "x"})
    assert root_hash(LAYOUT) != root_hash(other)


def test_the_salt_changes_the_root() -> None:
    assert len({root_hash(LAYOUT), root_hash(LAYOUT, "a"), root_hash(LAYOUT, "b")}) == 3


def test_another_process_with_another_hash_seed_computes_the_same_hashes() -> None:
    code = (
        "from kvrelay.kvcache.hashing import *; from kvrelay.types import LayoutFingerprint;"
        f"root = root_hash(LayoutFingerprint(*{dataclasses.astuple(LAYOUT)!r}), 's');"
        "print(block_hashes(root, range(9), 4)[-1].hex())"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, env={"PYTHONHASHSEED": "7"}
    )
    assert out.stdout.strip() == block_hashes(root_hash(LAYOUT, "s"), range(9), 4)[-1].hex()
