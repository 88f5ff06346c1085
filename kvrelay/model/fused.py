"""A decoder layer's work between torch's products, on the CPU in float32 or float64. Knows the kernels' arguments.

Norms, the gate, the rotation and the writing of KV are one pass each over their rows; attention of decode rows and
short extends reads the pool through the block tables in place. Long chunks attend through torch (`PagedAttention`).
Steps of few rows go another way: `few`.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvrelay.model.attention import PagedAttention, is_short
from kvrelay.model.batch import StepBatch
from kvrelay.model.config import ModelConfig
from kvrelay.model.kernels import block
from kvrelay.model.native import Arguments, Kernel, Team, kernels
from kvrelay.model.rope import Rotation

CHUNK_TOKENS = 256
"""As kernels.attention.CHUNK_TOKENS."""
BARRIER_BYTES = 128
"""As kernels.team.BARRIER_BYTES."""
_SMALL = 1 << 15
"""Elements up to which a pass is quicker on one thread than a team is woken."""


class FusedKernels:
    """What is constant in a model: compiled code, sizes, epsilon."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, cache_dir: str = "") -> None:
        """Compiles if the machine has not done so before."""
        self.config, self.team = config, Team()
        found = kernels(dtype, cache_dir)
        self.add_norm, self.gate = found["add_norm"], found["gate"]
        self.attention, self.piece = found["attention"], found["piece"]
        self.constants = torch.tensor([config.rms_eps, config.head_dim**-0.5], dtype=dtype)


class FusedStep:
    """One step's index arrays and scratch memory, made once and used by every layer."""

    def __init__(self, fused: FusedKernels, batch: StepBatch, kv: Tensor, rotation: Rotation) -> None:
        self._fused, self._config = fused, fused.config
        self._threads = fused.team.size
        short = [s for s in range(len(batch.context_lens)) if is_short(batch, s)]
        self._long = (
            PagedAttention(batch, kv, self._config.heads, without=short)
            if len(short) < len(batch.context_lens)
            else None
        )
        self._rows = batch.token_ids.shape[0]
        read = sum(batch.context_lens[s] for s in short)
        work = (self._rows * 2 + read) * self._config.heads * self._config.head_dim
        self._attention_threads = self._threads if work > _SMALL else 1
        self._attention = AttentionBlock(fused, batch, kv, rotation, short, self._attention_threads)

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
        self._attention.set(
            {
                block.QKV: qkv,
                block.HEAD_NORMS: 0 if norm is None else norm,
                block.LAYER: layer,
                block.ATTENTION: out,
            }
        )
        self._run(self._fused.attention, self._attention.arguments, self._attention_threads)
        if self._long is not None:
            self._long.attend_into(layer, qkv.view(self._rows, -1, head_dim)[:, :heads], out)
        return out

    def _run(self, kernel: Kernel, arguments: Arguments, threads: int) -> None:
        self._fused.team.run(kernel, arguments, threads)


class AttentionBlock:
    """The kernels' argument block, as far as a step's attention goes. What is put in stays alive as long as it."""

    def __init__(
        self,
        fused: FusedKernels,
        batch: StepBatch,
        kv: Tensor,
        rotation: Rotation,
        sequences: Sequence[int],
        threads: int,
    ) -> None:
        """sequences: those that attend in the kernel."""
        config, half = fused.config, fused.config.head_dim // 2
        blocks, layers, _, kv_heads, block_tokens, head_dim = kv.shape
        items = _Items(batch, sequences, block_tokens)
        count, slots = len(items.pieces) // 4, batch.slots
        self.arguments = Arguments([0] * block.STEP_LENGTH)
        self._alive: dict[int, Tensor | int] = {}
        self.set(
            {
                block.COS: rotation.cos[:, 0, :half].contiguous(),
                block.SIN: rotation.signed_sin[:, 0, half:].contiguous(),
                block.BLOCKS: slots // block_tokens,
                block.SLOTS: slots % block_tokens,
                block.POOL: kv,
                block.CONSTANTS: fused.constants,
                block.ROWS: len(slots),
                block.HEADS: config.heads,
                block.KV_HEADS: kv_heads,
                block.HEAD_DIM: head_dim,
                block.POOL_BLOCKS: blocks,
                block.BLOCK_TOKENS: block_tokens,
                block.LAYERS: layers,
                block.PIECES: torch.tensor(items.pieces, dtype=torch.int64),
                block.PIECE_COUNT: count,
                block.TABLE: torch.tensor(items.table, dtype=torch.int64),
                block.TABLE_LENGTH: len(items.table),
                block.ATTENDED: torch.tensor(items.rows, dtype=torch.int64),
                block.ATTENDED_COUNT: len(items.rows) // 3,
                block.SCORES: kv.new_empty(threads * config.heads // kv_heads * CHUNK_TOKENS),
                block.MERGED: kv.new_empty(config.heads * count * (head_dim + 2)),
                block.TEAM: threads,
                block.ITEM: kv.itemsize,
                block.PIECE_CODE: fused.piece.address,
                block.SELF: self.arguments.address,
                block.BARRIER: torch.zeros(BARRIER_BYTES, dtype=torch.uint8),
            }
        )

    def set(self, values: Mapping[int, Tensor | int]) -> None:
        """Numbers, and tensors by their address; by kernels.block's names."""
        self._alive.update(values)
        for place, value in values.items():
            self.arguments.values[place] = value if isinstance(value, int) else value.data_ptr()


class _Items:
    """The attention work of short sequences: which tokens each row sees, cut into pieces by position alone."""

    def __init__(self, batch: StepBatch, sequences: Sequence[int], block_tokens: int) -> None:
        self.pieces: list[int] = []
        """(row, first token, end token, where its table begins), flat."""
        self.rows: list[int] = []
        """(row, first piece, end piece), flat."""
        self.table: list[int] = []
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
                for at in range(0, seen, piece_tokens):
                    self.pieces += (row, at, min(at + piece_tokens, seen), offset)
                self.rows += (row, first, len(self.pieces) // 4)
