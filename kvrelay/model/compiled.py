"""What the compiled steps share: a model's constants and weights, and a step's argument block as far as attention goes.

Knows the kernels' arguments. `few` and `many` fill in the rest.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvrelay.model.batch import StepBatch
from kvrelay.model.config import ModelConfig
from kvrelay.model.kernels import block
from kvrelay.model.native import Arguments, Team, kernels

CHUNK_TOKENS = 256
"""As kernels.attention.CHUNK_TOKENS."""
BARRIER_BYTES = 128
"""As kernels.team.BARRIER_BYTES."""


class Compiled:
    """What is constant in a model: compiled code, sizes, epsilon, where the weights lie."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        layers: Sequence[Mapping[int, Tensor | None]],
        cache_dir: str = "",
    ) -> None:
        """layers: kernels.block's names of a layer's parts. Compiles if the machine has not done so before."""
        self.config, self.team = config, Team()
        found = kernels(dtype, cache_dir)
        self.attention, self.piece = found["attention"], found["piece"]
        self.constants = torch.tensor([config.rms_eps, config.head_dim**-0.5], dtype=dtype)
        self._kept = layers
        self.weights = torch.tensor(
            [[_address(layer.get(part)) for part in range(block.LAYER_LENGTH)] for layer in layers], dtype=torch.int64
        )


class AttentionBlock:
    """The kernels' argument block, as far as a step's attention goes. What is put in stays alive as long as it."""

    def __init__(
        self,
        compiled: Compiled,
        batch: StepBatch,
        kv: Tensor,
        sequences: Sequence[int],
        threads: int,
    ) -> None:
        """sequences: those whose rows attend one by one."""
        config = compiled.config
        blocks, layers, _, kv_heads, block_tokens, head_dim = kv.shape
        items = _Items(batch, sequences, block_tokens)
        count, slots = len(items.pieces) // 4, batch.slots
        self.arguments = Arguments([0] * block.PANELS_LENGTH)
        self._alive: dict[int, Tensor | int] = {}
        self.set(
            {
                block.BLOCKS: slots // block_tokens,
                block.SLOTS: slots % block_tokens,
                block.POOL: kv,
                block.CONSTANTS: compiled.constants,
                block.ROWS: len(slots),
                block.HEADS: config.heads,
                block.KV_HEADS: kv_heads,
                block.HEAD_DIM: head_dim,
                block.POOL_BLOCKS: blocks,
                block.BLOCK_TOKENS: block_tokens,
                block.LAYERS: layers,
                block.WEIGHTS: compiled.weights,
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
                block.PIECE_CODE: compiled.piece.address,
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
    """The attention work of single rows: which tokens each one sees, cut into pieces by position alone."""

    def __init__(self, batch: StepBatch, sequences: Sequence[int], block_tokens: int) -> None:
        self.pieces: list[int] = []
        """(which of these rows, first token, end token, where its table begins), flat."""
        self.rows: list[int] = []
        """(which of these rows, first piece, end piece), flat."""
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
                number, first = len(self.rows) // 3, len(self.pieces) // 4
                for at in range(0, seen, piece_tokens):
                    self.pieces += (number, at, min(at + piece_tokens, seen), offset)
                self.rows += (number, first, len(self.pieces) // 4)


def _address(tensor: Tensor | None) -> int:
    assert tensor is None or tensor.is_contiguous()
    return 0 if tensor is None else tensor.data_ptr()
