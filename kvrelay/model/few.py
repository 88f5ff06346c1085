"""A step of few rows as one compiled call: embeddings in, logits out. Knows where the weights lie.

The weights are read as they were loaded, so processes that map one file share them; they are read once for all rows.
Between the layers nothing returns to Python, so a step waits for the interpreter's lock twice, not hundreds of times.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvrelay.model.batch import StepBatch
from kvrelay.model.fused import AttentionBlock, FusedKernels
from kvrelay.model.kernels import block
from kvrelay.model.linear import Linear
from kvrelay.model.native import few_kernels
from kvrelay.model.rope import Rotation

_SMALL = 1 << 18
"""Multiplications of a layer up to which one thread is quicker than a team."""


class FewRows:
    """A model's weights as the kernel wants them."""

    def __init__(
        self,
        fused: FusedKernels,
        layers: Sequence[dict[int, Tensor | None]],
        norm: Tensor,
        head: Linear,
        cache_dir: str,
    ) -> None:
        """layers: kernels.block's names of a layer's parts."""
        self._fused, self._norm, self._head = fused, norm, head
        self._kernels = few_kernels(norm.dtype, head.weight.dtype, cache_dir)
        self._kept = layers
        self._weights = torch.tensor(
            [[_address(layer.get(part)) for part in range(block.LAYER_LENGTH)] for layer in layers], dtype=torch.int64
        )

    def logits(self, x: Tensor, batch: StepBatch, kv: Tensor, rotation: Rotation) -> Tensor:
        """[R, vocab] from embeddings x [T, hidden], which are changed; writes the pool."""
        config, (rows, hidden), wanted = self._fused.config, x.shape, batch.logit_rows.contiguous()
        vocab, inner = self._head.weight.shape[0], config.intermediate
        threads = self._fused.team.size if rows * hidden * inner > _SMALL else 1
        attention = AttentionBlock(self._fused, batch, kv, rotation, range(len(batch.context_lens)), threads)
        qkv = x.new_empty(rows, (config.heads + 2 * config.kv_heads) * config.head_dim)
        attended = x.new_empty(rows, config.heads * config.head_dim)
        normed = x.new_empty(threads, max(rows, len(wanted)), hidden)
        delta, gate_up, logits = torch.empty_like(x), x.new_empty(rows, 2 * inner), x.new_empty(len(wanted), vocab)
        attention.set(
            {
                block.QKV: qkv,
                block.ATTENTION: attended,
                block.WEIGHTS: self._weights,
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
                block.ATTENTION_CODE: self._fused.attention.address,
                block.PRODUCT_CODE: self._kernels["product"].address,
            }
        )
        self._fused.team.run(self._kernels["step"], attention.arguments, threads)
        return logits


def _address(tensor: Tensor | None) -> int:
    assert tensor is None or tensor.is_contiguous()
    return 0 if tensor is None else tensor.data_ptr()
