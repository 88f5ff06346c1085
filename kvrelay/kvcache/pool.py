"""The KV pool: one tensor of blocks, and which of them are free. Knows no sequence, no token, no hash."""

from collections.abc import Iterable

import torch

from kvrelay.types import LayoutFingerprint

Payload = bytes | bytearray | memoryview


class BrokenInvariant(AssertionError):
    """The bookkeeping of blocks contradicts itself: a bug, never a client's error."""


class KvPool:
    """`blocks` blocks of KV in one block-major tensor.

    Allocation belongs to one thread (the engine's). `write` and `read` may come from another thread, for blocks that
    the caller has reserved: they touch no bookkeeping.
    """

    def __init__(self, layout: LayoutFingerprint, blocks: int, device: torch.device | str = "cpu") -> None:
        if blocks < 1:
            raise ValueError(f"a pool needs at least one block, not {blocks}")
        self.layout = layout
        self.blocks = blocks
        self.block_bytes = layout.block_bytes
        self.device = torch.device(device)
        shape = (blocks, layout.layers, 2, layout.kv_heads, layout.block_tokens, layout.head_dim)
        self.tensor = torch.zeros(shape, dtype=getattr(torch, layout.kv_dtype), device=self.device)
        """[block, layer, k/v, kv_head, slot, head_dim]; a block is one contiguous run of `block_bytes` bytes."""
        self._bytes = self.tensor.view(-1).view(torch.uint8)
        self._host = self._bytes.numpy().data if self.device.type == "cpu" else None
        # Lowest ids first, so that small loads touch little memory.
        self._free = list(range(blocks - 1, -1, -1))
        self._is_free = [True] * blocks

    @property
    def free_count(self) -> int:
        """Blocks that `allocate` can hand out."""
        return len(self._free)

    def allocate(self, n: int) -> list[int]:
        """Takes n blocks; their bytes are undefined. BrokenInvariant if fewer are free: callers look first."""
        if n > len(self._free):
            raise BrokenInvariant(f"{n} blocks wanted, {len(self._free)} free")
        taken = [self._free.pop() for _ in range(n)]
        for block in taken:
            self._is_free[block] = False
        return taken

    def free(self, ids: Iterable[int]) -> None:
        """Gives blocks back. BrokenInvariant if one is free already."""
        for block in ids:
            if self._is_free[block]:
                raise BrokenInvariant(f"block {block} is freed twice")
            self._is_free[block] = True
            self._free.append(block)

    def is_free(self, block_id: int) -> bool:
        """Whether nobody holds this block."""
        return self._is_free[block_id]

    def write(self, block_id: int, offset: int, payload: Payload) -> None:
        """Copies bytes into a block, from any thread. ValueError if they do not lie within the block."""
        source = memoryview(payload).cast("B")
        start, end = self._span(block_id, offset, len(source))
        if self._host is not None:
            self._host[start:end] = source
        elif start < end:
            self._bytes[start:end].copy_(torch.frombuffer(bytearray(source), dtype=torch.uint8))

    def read(self, block_id: int) -> memoryview:
        """A block's bytes, from any thread: on the CPU a read-only view of the pool itself, else a copy on the host."""
        start, end = self._span(block_id, 0, self.block_bytes)
        if self._host is not None:
            return self._host[start:end].toreadonly()
        return self._bytes[start:end].cpu().numpy().data.toreadonly()

    def view(self, block_id: int) -> memoryview | None:
        """A block's bytes in the pool itself, to be written from any thread; None if the pool is not in host memory."""
        start, end = self._span(block_id, 0, self.block_bytes)
        return None if self._host is None else self._host[start:end]

    def _span(self, block_id: int, offset: int, length: int) -> tuple[int, int]:
        if not 0 <= block_id < self.blocks or offset < 0 or offset + length > self.block_bytes:
            size = f"{self.blocks} blocks of {self.block_bytes} bytes"
            raise ValueError(f"bytes {offset}..{offset + length} of block {block_id}: the pool has {size}")
        return block_id * self.block_bytes + offset, block_id * self.block_bytes + offset + length

    def check_integrity(self) -> None:
        """BrokenInvariant unless the free list and the marks agree."""
        if len(set(self._free)) != len(self._free) or len(self._free) != sum(self._is_free):
            raise BrokenInvariant("the pool's free list and its marks differ")
