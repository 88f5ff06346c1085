"""The pool: allocation as a state machine, and bytes in and out."""

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvrelay.kvcache.pool import BrokenInvariant, KvPool
from kvrelay.types import LayoutFingerprint


def layout(dtype: str = "float32") -> LayoutFingerprint:
    return LayoutFingerprint(weights="w", layers=2, kv_heads=1, head_dim=2, block_tokens=4, dtype=dtype, rope="r")


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = KvPool(layout(), 6)
        self.held: dict[int, bytes] = {}

    @rule(n=st.integers(0, 6), fill=st.integers(0, 255))
    def allocate(self, n: int, fill: int) -> None:
        if n > self.pool.free_count:
            with pytest.raises(BrokenInvariant):
                self.pool.allocate(n)
            return
        taken = self.pool.allocate(n)
        assert len(taken) == n and not self.held.keys() & set(taken)
        for block in taken:
            self.held[block] = bytes([fill]) * self.pool.block_bytes
            self.pool.write(block, 0, self.held[block])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.held)))
        del self.held[block]
        self.pool.free([block])
        with pytest.raises(BrokenInvariant):
            self.pool.free([block])

    @precondition(lambda self: self.held)
    @rule(data=st.data(), offset=st.integers(0, 128), payload=st.binary(max_size=40))
    def write(self, data: st.DataObject, offset: int, payload: bytes) -> None:
        block = data.draw(st.sampled_from(sorted(self.held)))
        if offset + len(payload) > self.pool.block_bytes:
            with pytest.raises(ValueError):
                self.pool.write(block, offset, payload)
            return
        self.pool.write(block, offset, memoryview(payload))
        old = self.held[block]
        self.held[block] = old[:offset] + payload + old[offset + len(payload) :]

    @invariant()
    def blocks_hold_their_own_bytes_and_are_counted(self) -> None:
        self.pool.check_integrity()
        assert self.pool.free_count == 6 - len(self.held)
        for block, expected in self.held.items():
            assert bytes(self.pool.read(block)) == expected


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPool = PoolMachine.TestCase


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16", "int8"])
def test_a_block_is_its_tensor_as_one_run_of_bytes(dtype: str) -> None:
    pool = KvPool(layout(dtype), 3)
    assert pool.tensor.shape == (3, 2, 2, 1, 4, 2)
    pool.tensor[1] = torch.arange(32).reshape(2, 2, 1, 4, 2)
    assert bytes(pool.read(1)) == pool.tensor[1].contiguous().view(torch.uint8).numpy().tobytes()
    pool.write(2, 0, pool.read(1))
    assert torch.equal(pool.tensor[2], pool.tensor[1])
    assert not pool.tensor[0].any()


def test_reading_does_not_copy_and_cannot_write() -> None:
    pool = KvPool(layout(), 2)
    view = pool.read(0)
    pool.write(0, 0, np.float32(7).tobytes())
    assert view[:4] == np.float32(7).tobytes()
    with pytest.raises(TypeError):
        view[0] = 1


@pytest.mark.parametrize(("block", "offset", "size"), [(-1, 0, 1), (2, 0, 1), (0, -1, 1), (0, 128, 1), (1, 0, 129)])
def test_bytes_outside_a_block_are_refused(block: int, offset: int, size: int) -> None:
    pool = KvPool(layout(), 2)
    with pytest.raises(ValueError):
        pool.write(block, offset, b"x" * size)
    assert not pool.tensor.any()
