"""Runs a model over a pool the way an engine would, without one."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvrelay.model.batch import StepBatch
from kvrelay.model.config import ModelConfig
from kvrelay.model.transformer import Transformer


@dataclass
class Pool:
    """A pool with garbage in it, and its free blocks in an order of the test's choice."""

    config: ModelConfig
    dtype: torch.dtype
    block_tokens: int = 16
    blocks: int = 64
    order: Sequence[int] = ()
    tensor: Tensor = field(init=False)
    free: list[int] = field(init=False)

    def __post_init__(self) -> None:
        config = self.config
        shape = (self.blocks, config.layers, 2, config.kv_heads, self.block_tokens, config.head_dim)
        self.tensor = torch.randn(shape, dtype=self.dtype, generator=torch.Generator().manual_seed(3)) * 10
        self.free = list(self.order) or list(range(self.blocks))


@dataclass
class Running:
    """One sequence: its ids, how many are computed, its blocks."""

    ids: list[int]
    computed: int = 0
    blocks: list[int] = field(default_factory=list)


def step(model: Transformer, pool: Pool, work: Sequence[tuple[Running, int]]) -> list[Tensor]:
    """Computes the next `count` ids of each sequence in one step; all their rows' logits, per sequence."""
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts = [0]
    for sequence, count in work:
        end = sequence.computed + count
        while len(sequence.blocks) * pool.block_tokens < end:
            sequence.blocks.append(pool.free.pop())
        for position in range(sequence.computed, end):
            ids.append(sequence.ids[position])
            positions.append(position)
            block = sequence.blocks[position // pool.block_tokens]
            slots.append(block * pool.block_tokens + position % pool.block_tokens)
        sequence.computed = end
        starts.append(len(ids))
    batch = StepBatch(
        torch.tensor(ids),
        torch.tensor(positions),
        torch.tensor(slots),
        starts,
        [sequence.computed for sequence, _ in work],
        [sequence.blocks for sequence, _ in work],
        torch.arange(len(ids)),
    )
    logits = model.forward(batch, pool.tensor)
    return [logits[start:end] for start, end in zip(starts, starts[1:], strict=False)]


def one_shot(model: Transformer, ids: list[int], block_tokens: int = 16) -> Tensor:
    """Logits [len(ids), vocab] of one sequence, computed at once."""
    pool = Pool(model.config, model.dtype, block_tokens, -(-len(ids) // block_tokens))
    (logits,) = step(model, pool, [(Running(ids), len(ids))])
    return logits
