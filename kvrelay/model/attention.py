"""Attention over the paged KV pool, for any mix of decode rows and prefill chunks. Knows blocks, no sequences' text.

Pool: [block, layer, k/v, kv_head, slot, head_dim], contiguous. Seen as rows of head_dim elements it takes new tokens;
seen as runs of block_tokens * head_dim elements (one head of one block) it is read with a single gather a layer, which
lands in the order that scaled_dot_product_attention wants.

The pool must hold finite numbers everywhere (zeros at first): slots that are not attended to get weight 0, not skipped.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kvrelay.model.batch import StepBatch


@dataclass(frozen=True, slots=True)
class _Group:
    """Sequences with equally many new tokens and similar context, attended to at once; blocks are padded to n."""

    count: int
    query_len: int
    rows: Tensor | None
    """i64[count * query_len] of the step's T rows; None: all of them, in order."""
    runs: Tensor
    """i64[layers, 2 * count * kv_heads * n]: which pool runs hold K, then V."""
    mask: Tensor
    """Added to the scores: [count, 1, 1 or query_len * heads per kv head, n * block_tokens]."""


class PagedAttention:
    """One step's index tensors, made once and used by every layer."""

    def __init__(self, batch: StepBatch, kv: Tensor, heads: int) -> None:
        """kv: the pool; heads: query heads, a multiple of its kv_heads."""
        _, self._layers, _, self._kv_heads, self._block_tokens, self._head_dim = kv.shape
        self._shared = heads // self._kv_heads
        self._rows = kv.view(-1, self._head_dim)
        self._runs = kv.view(-1, self._block_tokens * self._head_dim)
        self._key_rows = self._new_rows(batch.slots.to(kv.device))
        self._value_rows = self._key_rows + self._kv_heads * self._block_tokens
        self._groups = [self._group(batch, alike) for alike in _alike(batch, self._block_tokens)]

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Puts the new tokens' K and V [T, kv_heads, head_dim] into the pool."""
        self._rows.index_copy_(0, self._key_rows[layer], keys.reshape(-1, self._head_dim))
        self._rows.index_copy_(0, self._value_rows[layer], values.reshape(-1, self._head_dim))

    def attend(self, layer: int, queries: Tensor) -> Tensor:
        """queries [T, heads, head_dim] -> [T, heads * head_dim]; each row sees its sequence up to its own position."""
        if len(self._groups) == 1 and self._groups[0].rows is None:
            return self._attend_group(layer, self._groups[0], queries)
        out = queries.new_empty(queries.shape[0], queries.shape[1] * self._head_dim)
        for group in self._groups:
            assert group.rows is not None
            out.index_copy_(0, group.rows, self._attend_group(layer, group, queries.index_select(0, group.rows)))
        return out

    def _attend_group(self, layer: int, group: _Group, queries: Tensor) -> Tensor:
        """The query heads that share a KV head become rows of one matrix: K and V are never repeated."""
        gathered = self._runs.index_select(0, group.runs[layer])
        keys, values = gathered.view(2, group.count, self._kv_heads, -1, self._head_dim).unbind(0)
        parts = (group.count, group.query_len, self._kv_heads, self._shared, self._head_dim)
        packed = queries.reshape(parts).transpose(1, 2).reshape(group.count, self._kv_heads, -1, self._head_dim)
        attended = functional.scaled_dot_product_attention(packed, keys, values, attn_mask=group.mask)
        back = attended.view(group.count, self._kv_heads, group.query_len, self._shared, self._head_dim)
        return back.transpose(1, 2).reshape(group.count * group.query_len, -1)

    def _new_rows(self, slots: Tensor) -> Tensor:
        """i64[layers, T * kv_heads]: the pool row of each new token's key, by layer and head."""
        block, offset = slots // self._block_tokens, slots % self._block_tokens
        layers = torch.arange(self._layers, device=slots.device)[:, None, None]
        heads = torch.arange(self._kv_heads, device=slots.device)
        run = ((block * self._layers + layers.squeeze(-1)) * 2 * self._kv_heads)[..., None] + heads
        return (run * self._block_tokens + offset[:, None]).flatten(1)

    def _group(self, batch: StepBatch, members: Sequence[int]) -> _Group:
        device = self._rows.device
        start = batch.query_starts
        query_len = start[members[0] + 1] - start[members[0]]
        row_numbers = [row for s in members for row in range(start[s], start[s + 1])]
        rows = torch.tensor(row_numbers, device=device)
        tables = torch.tensor(_padded_tables(batch, members, self._block_tokens), device=device)
        positions = batch.positions.to(device).index_select(0, rows).view(len(members), query_len)
        alone = row_numbers == list(range(start[-1]))
        return _Group(
            len(members),
            query_len,
            None if alone else rows,
            self._runs_of(tables),
            self._mask(positions, tables.shape[1]),
        )

    def _runs_of(self, tables: Tensor) -> Tensor:
        """tables i64[count, n] -> i64[layers, 2 * count * kv_heads * n]."""
        device = tables.device
        layers = torch.arange(self._layers, device=device).view(-1, 1, 1, 1, 1)
        sides = torch.arange(2, device=device).view(-1, 1, 1, 1)
        heads = torch.arange(self._kv_heads, device=device).view(-1, 1)
        runs = ((tables[:, None] * self._layers + layers) * 2 + sides) * self._kv_heads + heads
        return runs.flatten(1)

    def _mask(self, positions: Tensor, blocks: int) -> Tensor:
        """0 where a key's position is at most the query's, else -inf."""
        keys = torch.arange(blocks * self._block_tokens, device=positions.device)
        hidden = keys > positions[..., None]
        mask = torch.zeros(hidden.shape, dtype=self._rows.dtype, device=positions.device).masked_fill_(
            hidden, -torch.inf
        )
        if positions.shape[1] > 1:
            mask = mask.repeat_interleave(self._shared, 1)
        return mask[:, None]


def _alike(batch: StepBatch, block_tokens: int) -> Iterator[list[int]]:
    """Sequences that may be padded to one shape: as many new tokens, context within a power of two."""
    groups: dict[tuple[int, int], list[int]] = {}
    for s in range(len(batch.context_lens)):
        query_len = batch.query_starts[s + 1] - batch.query_starts[s]
        groups.setdefault((query_len, _blocks(batch.context_lens[s], block_tokens).bit_length()), []).append(s)
    return iter(groups.values())


def _padded_tables(batch: StepBatch, members: Sequence[int], block_tokens: int) -> list[list[int]]:
    """Each member's blocks, padded with its own last one."""
    counts = [_blocks(batch.context_lens[s], block_tokens) for s in members]
    longest = max(counts)
    tables = []
    for s, count in zip(members, counts, strict=True):
        table = list(batch.block_tables[s][:count])
        assert len(table) == count, f"block table of {len(table)} blocks for {batch.context_lens[s]} tokens"
        tables.append(table + table[-1:] * (longest - count))
    return tables


def _blocks(tokens: int, block_tokens: int) -> int:
    return -(-tokens // block_tokens)
