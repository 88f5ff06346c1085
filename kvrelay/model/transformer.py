"""The Llama-family decoder: embeddings, layers, logits. Knows no files, no scheduling, no sampling."""

import torch
from torch import Tensor
from torch.nn import functional

from kvrelay.model.attention import PagedAttention
from kvrelay.model.batch import StepBatch
from kvrelay.model.compiled import Compiled
from kvrelay.model.config import ModelConfig
from kvrelay.model.few import FewRows
from kvrelay.model.kernels import block
from kvrelay.model.linear import Linear
from kvrelay.model.many import ManyRows
from kvrelay.model.native import WIDE_ROWS, few_rows
from kvrelay.model.rope import Rope, Rotation
from kvrelay.model.source import WeightSource, take


class _Placed:
    """Takes tensors from a source and puts them where the model lives."""

    def __init__(self, source: WeightSource, device: torch.device, dtype: torch.dtype) -> None:
        self._source, self._device, self._dtype = source, device, dtype

    def __call__(self, name: str, *shape: int) -> Tensor:
        return take(self._source, name, shape).to(self._device, self._dtype)


class Layer:
    """Attention and feed-forward, each behind an RMS norm and added to the residual stream."""

    def __init__(self, index: int, config: ModelConfig, placed: _Placed, int8: bool) -> None:
        at, hidden, inner = f"model.layers.{index}", config.hidden, config.intermediate
        q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self._index, self._config = index, config
        self._attention_norm = placed(f"{at}.input_layernorm.weight", hidden)
        names = (("q_proj", q), ("k_proj", kv), ("v_proj", kv))
        self._qkv = Linear(
            [placed(f"{at}.self_attn.{name}.weight", size, hidden) for name, size in names],
            [placed(f"{at}.self_attn.{name}.bias", size) for name, size in names] if config.qkv_bias else [],
            int8=int8,
        )
        self._qk_norm = self._head_norms(at, placed) if config.qk_norm else None
        self._out = Linear([placed(f"{at}.self_attn.o_proj.weight", hidden, q)], int8=int8)
        self._mlp_norm = placed(f"{at}.post_attention_layernorm.weight", hidden)
        self._gate_up = Linear(
            [placed(f"{at}.mlp.{name}.weight", inner, hidden) for name in ("gate_proj", "up_proj")], int8=int8
        )
        self._down = Linear([placed(f"{at}.mlp.down_proj.weight", hidden, inner)], int8=int8)

    def forward(self, x: Tensor, rotation: Rotation, attention: PagedAttention) -> Tensor:
        """x [T, hidden] -> [T, hidden]; the tokens' KV is in the pool afterwards."""
        config, eps = self._config, self._config.rms_eps
        qkv = self._qkv(_rms_norm(x, self._attention_norm, eps)).view(x.shape[0], -1, config.head_dim)
        qk, values = qkv[:, : -config.kv_heads], qkv[:, -config.kv_heads :]
        if self._qk_norm is not None:
            qk = _rms_norm(qk, None, eps) * self._qk_norm
        qk = rotation.apply(qk)
        attention.write(self._index, qk[:, config.heads :], values)
        x = x + self._out(attention.attend(self._index, qk[:, : config.heads]))
        gate, up = self._gate_up(_rms_norm(x, self._mlp_norm, eps)).chunk(2, -1)
        return x + self._down(functional.silu(gate) * up)

    def parts(self) -> dict[int, Tensor | None]:
        """What the kernels read, by kernels.block's names."""
        return {
            block.ATTENTION_NORM: self._attention_norm,
            block.QKV_WEIGHTS: self._qkv.weight,
            block.QKV_SCALES: self._qkv.scales,
            block.QKV_BIASES: self._qkv.bias,
            block.QK_NORMS: self._qk_norm,
            block.OUT_WEIGHTS: self._out.weight,
            block.OUT_SCALES: self._out.scales,
            block.MLP_NORM: self._mlp_norm,
            block.GATE_UP_WEIGHTS: self._gate_up.weight,
            block.GATE_UP_SCALES: self._gate_up.scales,
            block.DOWN_WEIGHTS: self._down.weight,
            block.DOWN_SCALES: self._down.scales,
        }

    def _head_norms(self, at: str, placed: _Placed) -> Tensor:
        """[heads + kv_heads, head_dim]: q's weight for each query head, then k's for each KV head."""
        config = self._config
        q = placed(f"{at}.self_attn.q_norm.weight", config.head_dim)
        k = placed(f"{at}.self_attn.k_norm.weight", config.head_dim)
        return torch.stack([q] * config.heads + [k] * config.kv_heads)


class Transformer:
    """A model on one device, in one dtype."""

    def __init__(
        self,
        config: ModelConfig,
        source: WeightSource,
        device: torch.device,
        dtype: torch.dtype,
        cache_dir: str = "",
        *,
        int8: bool = False,
    ) -> None:
        """int8: of the weights, all matrices but the embeddings; dtype is then what is computed in.

        Raises ModelFileError if the source lacks a tensor or holds one of a wrong shape.
        """
        placed = _Placed(source, device, dtype)
        self.config, self.device, self.dtype = config, device, dtype
        self._embedding = placed("model.embed_tokens.weight", config.vocab_size, config.hidden)
        self._layers = [Layer(index, config, placed, int8) for index in range(config.layers)]
        self._norm = placed("model.norm.weight", config.hidden)
        head = self._embedding if config.tied else placed("lm_head.weight", config.vocab_size, config.hidden)
        self._head = Linear([head], int8=int8)
        self._rope = Rope(config, device, dtype)
        native = device.type == "cpu" and dtype in (torch.float32, torch.float64)
        self._few_rows = few_rows() if native else 0
        self._few: FewRows | None = None
        self._many: ManyRows | None = None
        if self._few_rows:
            compiled = Compiled(config, dtype, [layer.parts() for layer in self._layers], cache_dir)
            self._few = FewRows(compiled, self._norm, self._head, cache_dir)
            if self._few_rows == WIDE_ROWS:
                self._many = ManyRows(compiled, self._head.weight.dtype, cache_dir)

    @torch.inference_mode()
    def forward(self, batch: StepBatch, kv: Tensor) -> Tensor:
        """Logits [R, vocab] of batch.logit_rows; float32, or float64 for a float64 model.

        Writes the new tokens' KV into kv, the pool [block, layer, k/v, kv_head, slot, head_dim] of the model's dtype.
        """
        rotation = self._rope.at(batch.positions.to(self.device))
        x = functional.embedding(batch.token_ids.to(self.device), self._embedding)
        if self._few is not None and len(x) <= self._few_rows:
            return self._few.logits(x, batch, kv, rotation)
        if self._many is not None:
            wanted = self._many.hidden(x, batch, kv, rotation)
        else:
            wanted = self._through(x, batch, kv, rotation).index_select(0, batch.logit_rows.to(self.device))
        if not len(wanted):
            return x.new_empty(0, self.config.vocab_size)
        logits = self._head(_rms_norm(wanted, self._norm, self.config.rms_eps))
        return logits if logits.dtype == torch.float64 else logits.float()

    def _through(self, x: Tensor, batch: StepBatch, kv: Tensor, rotation: Rotation) -> Tensor:
        attention = PagedAttention(batch, kv, self.config.heads)
        for layer in self._layers:
            x = layer.forward(x, rotation, attention)
        return x


def _rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return functional.rms_norm(x, (x.shape[-1],), weight, eps)
