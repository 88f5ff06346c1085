"""A step of many rows as one compiled call, in panels of tokens: embeddings in, hidden states of the wanted rows out.

A panel holds as many tokens as fit into two vectors, feature by feature. The weights are read as they were loaded.
"""

import torch
from torch import Tensor
from torch.nn import functional

from kvrelay.model.batch import StepBatch
from kvrelay.model.compiled import AttentionBlock, Compiled
from kvrelay.model.config import ModelConfig
from kvrelay.model.kernels import block
from kvrelay.model.native import many_kernels, tiles
from kvrelay.model.rope import Rotation

SHORT_ROWS = 4
"""New rows of one sequence up to which attention is bound by reading KV: they attend one by one."""


class ManyRows:
    """A model's steps of many rows."""

    def __init__(self, compiled: Compiled, weights: torch.dtype, cache_dir: str) -> None:
        """weights: the matrices' type."""
        self._compiled, config = compiled, compiled.config
        fits = not any(size % block.TILED for size in (config.hidden, config.intermediate, config.head_dim))
        self.tiled = compiled.constants.dtype == torch.float32 and fits and tiles()
        """Products of panels in AMX tiles."""
        self._kernels = many_kernels(compiled.constants.dtype, weights, cache_dir, tiled=self.tiled)

    def hidden(self, x: Tensor, batch: StepBatch, kv: Tensor, rotation: Rotation) -> Tensor:
        """[R, hidden] after all layers, of batch.logit_rows, from embeddings x [T, hidden]; writes the pool."""
        config, lanes, chunks = self._compiled.config, block.PANEL_BYTES // x.itemsize, _Chunks(batch)
        half, q, kv_width = config.head_dim // 2, config.heads * config.head_dim, config.kv_heads * config.head_dim
        panels, single = _panels(x, lanes), len(chunks.short_rows)
        count = len(panels)
        threads = min(self._compiled.team.size, count)
        private = _private_bytes(config, x.itemsize, -(-count // threads))
        attention = AttentionBlock(self._compiled, batch, kv, chunks.short, threads)
        attention.set(
            {
                block.QKV: x.new_empty(single, q + 2 * kv_width),
                block.ATTENTION: x.new_empty(single, q),
                block.SHORT_ROWS: torch.tensor(chunks.short_rows, dtype=torch.int64),
                block.SEQUENCES: torch.tensor(chunks.sequences, dtype=torch.int64),
                block.SEQUENCE_COUNT: len(chunks.sequences) // 4,
                block.LONG_TABLE: torch.tensor(chunks.table, dtype=torch.int64),
                block.HIDDEN: config.hidden,
                block.INNER: config.intermediate,
                block.PANELS: count,
                block.FIRST_WANTED: int(batch.logit_rows.min()) // lanes if len(batch.logit_rows) else count,
                block.PANEL_X: panels,
                block.PANEL_NORMED: torch.empty_like(panels),
                block.PANEL_QKV: x.new_empty(count, q + 2 * kv_width, lanes),
                block.PANEL_ATTENTION: x.new_zeros(count, q, lanes),
                block.PANEL_INNER: x.new_empty(count, config.intermediate, lanes),
                block.PANEL_COS: _panels(rotation.cos[:, 0, :half], lanes),
                block.PANEL_SIN: _panels(rotation.signed_sin[:, 0, half:], lanes),
                block.PRIVATE: torch.empty(threads, private, dtype=torch.uint8),
                block.PRIVATE_BYTES: private,
                block.PRODUCT_CODE: self._kernels["product"].address,
                block.ATTEND_CODE: self._kernels["attend"].address,
            }
        )
        self._compiled.team.run(self._kernels["step"], attention.arguments, threads)
        return panels[batch.logit_rows // lanes, :, batch.logit_rows % lanes]


class _Chunks:
    """Which sequences attend in panels, and which row by row."""

    def __init__(self, batch: StepBatch) -> None:
        self.short: list[int] = []
        """Sequences."""
        self.short_rows: list[int] = []
        self.sequences: list[int] = []
        """(first row, end row, tokens that the first row sees, where its table begins), flat, of the others."""
        self.table: list[int] = []
        for s in range(len(batch.context_lens)):
            start, end = batch.query_starts[s], batch.query_starts[s + 1]
            if end - start <= SHORT_ROWS:
                self.short.append(s)
                self.short_rows += range(start, end)
            else:
                self.sequences += (start, end, batch.context_lens[s] - (end - start) + 1, len(self.table))
                self.table += batch.block_tables[s]


def _panels(rows: Tensor, lanes: int) -> Tensor:
    """[T, n] -> [panel, n, lanes], with zeros beyond T."""
    padded = functional.pad(rows, (0, 0, 0, -len(rows) % lanes))
    return padded.view(-1, lanes, rows.shape[1]).transpose(1, 2).contiguous()


def _private_bytes(config: ModelConfig, item: int, panels: int) -> int:
    """Scratch of one thread with `panels` of its own: for a product, or for KV and what attends."""
    inputs = (config.hidden, config.intermediate, config.heads * config.head_dim)
    products = max(_product_bytes(features, item, panels) for features in inputs)
    items = panels * config.heads // config.kv_heads
    rows = 2 * block.TILE_TOKENS + items * (config.head_dim + block.STATE_ROWS)
    attention = 2 * block.TILE_TOKENS * config.head_dim * item + rows * block.PANEL_BYTES
    tiled = 2 * block.TILE_TOKENS * (config.head_dim // block.TILED + 1) + items * config.head_dim
    return -(-max(products, attention + tiled * block.PARTS_BYTES) // 64) * 64


def _product_bytes(inputs: int, item: int, panels: int) -> int:
    """For a block of weights and what comes of it; in tiles for two, and a pass of panels."""
    parts = inputs * block.PARTS_BYTES
    widened = block.BLOCK_OUTPUTS * (inputs * item + panels * block.PANEL_BYTES)
    tiled = 2 * parts + block.TILED * block.PANEL_BYTES + min(panels * parts, max(parts, block.TILED_PASS_BYTES))
    return max(widened, tiled)
