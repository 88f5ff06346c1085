"""A step of few rows as one compiled call: embeddings in, logits out. Knows where the weights lie.

The weights are read as they were loaded, so processes that map one file share them; they are read once for all rows.
Between the layers nothing returns to Python, so a step waits for the interpreter's lock twice, not hundreds of times.
"""

import torch
from torch import Tensor

from kvrelay.model.batch import StepBatch
from kvrelay.model.compiled import AttentionBlock, Compiled
from kvrelay.model.kernels import block
from kvrelay.model.linear import Linear
from kvrelay.model.native import few_kernels
from kvrelay.model.rope import Rotation

_SMALL = 1 << 18
"""Multiplications of a layer up to which one thread is quicker than a team."""


class FewRows:
    """A model's steps of few rows."""

    def __init__(self, compiled: Compiled, norm: Tensor, head: Linear, cache_dir: str) -> None:
        self._compiled, self._norm, self._head = compiled, norm, head
        self._kernels = few_kernels(norm.dtype, head.weight.dtype, cache_dir)

    def logits(self, x: Tensor, batch: StepBatch, kv: Tensor, rotation: Rotation) -> Tensor:
        """[R, vocab] from embeddings x [T, hidden], which are changed; writes the pool."""
        config, (rows, hidden), wanted = self._compiled.config, x.shape, batch.logit_rows.contiguous()
        vocab, inner, half = self._head.weight.shape[0], config.intermediate, config.head_dim // 2
        threads = self._compiled.team.size if rows * hidden * inner > _SMALL else 1
        attention = AttentionBlock(self._compiled, batch, kv, range(len(batch.context_lens)), threads)
        qkv = x.new_empty(rows, (config.heads + 2 * config.kv_heads) * config.head_dim)
        attended = x.new_empty(rows, config.heads * config.head_dim)
        normed = x.new_empty(threads, max(rows, len(wanted)), hidden)
        delta, gate_up, logits = torch.empty_like(x), x.new_empty(rows, 2 * inner), x.new_empty(len(wanted), vocab)
        attention.set(
            {
                block.COS: rotation.cos[:, 0, :half].contiguous(),
                block.SIN: rotation.signed_sin[:, 0, half:].contiguous(),
                block.QKV: qkv,
                block.ATTENTION: attended,
                block.X: x,
                block.HIDDEN: hidden,
                block.INNER: inner,
                block.NORMED: normed,
                block.DELTA: delta,
                block.GATE_UP: gate_up,
                block.LAST_NORM: self._norm,
                block.HEAD: self._head.weight,
                block.HEAD_SCALES: 0 if self._head.scales is None else self._head.scales,
                block.VOCAB: vocab,
                block.WANTED: wanted,
                block.WANTED_COUNT: len(wanted),
                block.LOGITS: logits,
                block.ATTENTION_CODE: self._compiled.attention.address,
                block.PRODUCT_CODE: self._kernels["product"].address,
            }
        )
        self._compiled.team.run(self._kernels["step"], attention.arguments, threads)
        return logits
