"""A decoder layer's work between its matrix products, on the CPU in float32 or float64. Knows the kernels' arguments.

Norms, the gate, the rotation and the writing of KV are one pass each over their rows; attention of decode rows and
short extends reads the pool through the block tables in place. Long chunks attend through torch (`PagedAttention`).
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvrelay.model.attention import PagedAttention, is_short
from kvrelay.model.batch import StepBatch
from kvrelay.model.config import ModelConfig
from kvrelay.model.native import Arguments, Kernel, Team, kernels
from kvrelay.model.rope import Rotation

CHUNK_TOKENS = 256
"""As kernels.CHUNK_TOKENS."""
_SMALL = 1 << 15
"""Elements up to which a pass is quicker on one thread than a team is woken."""


class FusedKernels:
    """What is constant in a model: compiled code, sizes, epsilon."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, cache_dir: str = "") -> None:
        """Compiles if the machine has not done so before."""
        self.config, self.team = config, Team()
        found = kernels(dtype, cache_dir)
        self.add_norm, self.gate, self.attention = found["add_norm"], found["gate"], found["attention"]
        self.constants = torch.tensor([config.rms_eps, config.head_dim**-0.5], dtype=dtype)


class FusedStep:
    """One step's index arrays and scratch memory, made once and used by every layer."""

    def __init__(self, fused: FusedKernels, batch: StepBatch, kv: Tensor, rotation: Rotation) -> None:
        self._fused, self._config = fused, fused.config
        self._threads = fused.team.size
        half = self._config.head_dim // 2
        self._cos = rotation.cos[:, 0, :half].contiguous()
        self._sin = rotation.signed_sin[:, 0, half:].contiguous()
        short = [s for s in range(len(batch.context_lens)) if is_short(batch, s)]
        self._long = (
            PagedAttention(batch, kv, self._config.heads, without=short)
            if len(short) < len(batch.context_lens)
            else None
        )
        self._rows = batch.token_ids.shape[0]
        items = _Items(batch, short, kv.shape[4])
        work = (self._rows * 2 + items.tokens) * self._config.heads * self._config.head_dim
        self._attention_threads = self._threads if work > _SMALL else 1
        self._attention = self._attention_arguments(batch, kv, items)

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
        """x [T, hidden] += delta, in place; returns its RMS norm times the weight."""
        out = torch.empty_like(x)
        rows, width = x.shape
        threads = self._threads if rows * width > _SMALL else 1
        arguments = (
            x.data_ptr(),
            0 if delta is None else delta.data_ptr(),
            weight.data_ptr(),
            self._fused.constants.data_ptr(),
            out.data_ptr(),
            rows,
            width,
            threads,
        )
        self._run(self._fused.add_norm, Arguments(arguments), threads)
        return out

    def gate(self, both: Tensor) -> Tensor:
        """silu of the first half of each row [T, 2 * inner] times the second half."""
        rows, inner = both.shape[0], both.shape[1] // 2
        out = both.new_empty(rows, inner)
        threads = self._threads if rows * inner > _SMALL else 1
        self._run(self._fused.gate, Arguments((both.data_ptr(), out.data_ptr(), rows, inner, threads)), threads)
        return out

    def attend(self, layer: int, qkv: Tensor, norm: Tensor | None) -> Tensor:
        """qkv [T, (heads + 2 kv_heads) * head_dim], changed in place -> [T, heads * head_dim]; writes the pool."""
        heads, head_dim = self._config.heads, self._config.head_dim
        out = qkv.new_empty(self._rows, heads * head_dim)
        values = self._attention.values
        values[0], values[6], values[15] = qkv.data_ptr(), 0 if norm is None else norm.data_ptr(), layer
        values[24] = out.data_ptr()
        self._run(self._fused.attention, self._attention, self._attention_threads)
        if self._long is not None:
            self._long.attend_into(layer, qkv.view(self._rows, -1, head_dim)[:, :heads], out)
        return out

    def _run(self, kernel: Kernel, arguments: Arguments, threads: int) -> None:
        self._fused.team.run(kernel, arguments, threads)

    def _attention_arguments(self, batch: StepBatch, kv: Tensor, items: "_Items") -> Arguments:
        config, count = self._config, len(items.pieces) // 4
        blocks, layers, _, kv_heads, block_tokens, head_dim = kv.shape
        group = config.heads // kv_heads
        threads = self._attention_threads
        scores = kv.new_empty(threads * group * CHUNK_TOKENS)
        merged = kv.new_empty(config.heads * count * (head_dim + 2))
        slots = batch.slots.numpy()
        # All that the kernel reads by address stays alive as long as this step.
        self._alive = arrays = (
            slots // block_tokens,
            slots % block_tokens,
            np.array(items.pieces, np.int64),
            np.array(items.table, np.int64),
            np.array(items.rows, np.int64),
        )
        self._scratch = scores, merged
        in_block, slot, pieces, table, rows = (one.ctypes.data for one in arrays)
        return Arguments(
            (
                *(0, self._cos.data_ptr(), self._sin.data_ptr(), in_block, slot, kv.data_ptr()),
                *(0, self._fused.constants.data_ptr(), self._rows, config.heads, kv_heads, head_dim),
                *(blocks, block_tokens, layers, 0),
                *(pieces, count, table, len(items.table), rows, len(items.rows) // 3),
                *(scores.data_ptr(), merged.data_ptr(), 0, threads, threads),
            )
        )


class _Items:
    """The attention work of short sequences: which tokens each row sees, cut into pieces by position alone."""

    def __init__(self, batch: StepBatch, sequences: Sequence[int], block_tokens: int) -> None:
        self.pieces: list[int] = []
        """(row, first token, end token, where its table begins), flat."""
        self.rows: list[int] = []
        """(row, first piece, end piece), flat."""
        self.table: list[int] = []
        self.tokens = 0
        """Read in all, by all rows."""
        piece_tokens = max(1, CHUNK_TOKENS // block_tokens) * block_tokens
        if piece_tokens > CHUNK_TOKENS:
            raise ValueError(f"blocks of {block_tokens} tokens; at most {CHUNK_TOKENS}")
        for s in sequences:
            start, end = batch.query_starts[s], batch.query_starts[s + 1]
            offset = len(self.table)
            self.table += batch.block_tables[s]
            for row in range(start, end):
                seen = batch.context_lens[s] - (end - 1 - row)
                first = len(self.pieces) // 4
                self.tokens += seen
                for at in range(0, seen, piece_tokens):
                    self.pieces += (row, at, min(at + piece_tokens, seen), offset)
                self.rows += (row, first, len(self.pieces) // 4)
