"""GGUF -> config and tensors. Knows llama.cpp's names, its rotary order and its quantizations; nothing of text."""

import hashlib
from collections.abc import Iterator
from math import prod
from pathlib import Path

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from torch import Tensor

from kvrelay.errors import ModelFileError
from kvrelay.gguf_file import GgufFile, GgufTensor, eos_token_ids, open_gguf
from kvrelay.model.config import ModelConfig, RopeScaling

ARCHITECTURES = ("llama", "qwen2", "qwen3")

_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_IN_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_KINDS = ("weight", "bias")


class GgufWeights:
    """A GGUF file's tensors, dequantized to float32 one at a time."""

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        self._file, self._config = file, config

    @property
    def where(self) -> str:
        return str(self._file.path)

    def names(self) -> Iterator[str]:
        """Hugging Face's, of the tensors that the file has."""
        inner = [
            f"model.layers.{n}.{part}.{kind}"
            for n in range(self._config.layers)
            for part in _IN_LAYER
            for kind in _KINDS
        ]
        return (name for name in [*_TOP, *inner] if gguf_name(name) in self._file.tensors)

    def tensor(self, name: str) -> Tensor | None:
        """f32 under Hugging Face's name. Raises ModelFileError: truncated file, unknown quantization."""
        found = self._file.tensors.get(gguf_name(name))
        if found is None:
            return None
        tensor = dequantize(self._file, found)
        if self._config.family == "llama" and (".q_proj." in name or ".k_proj." in name):
            return _half_split(tensor, self._config.heads if ".q_proj." in name else self._config.kv_heads)
        return tensor


def open_gguf_model(path: Path) -> tuple[ModelConfig, GgufWeights, str]:
    """Config, tensors, and the digest of the whole file. Raises ModelFileError."""
    file = open_gguf(path)
    config = read_config(file)
    identity = hashlib.blake2b(file.data, digest_size=16).hexdigest()
    return config, GgufWeights(file, config), identity


def gguf_name(name: str) -> str:
    """Hugging Face's tensor name -> llama.cpp's."""
    if name in _TOP:
        return _TOP[name]
    _, _, layer, rest = name.split(".", 3)
    part, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{_IN_LAYER[part]}.{kind}"


def dequantize(file: GgufFile, found: GgufTensor) -> Tensor:
    """f32 of the tensor's shape. Raises ModelFileError naming file, tensor and cause."""
    try:
        kind = GGMLQuantizationType(found.quantization)
        block, size = GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError):
        raise ModelFileError(f"{file.path}: tensor {found.name} has unknown ggml type {found.quantization}") from None
    if not found.shape or found.shape[-1] % block:
        raise ModelFileError(f"{file.path}: tensor {found.name}: rows of {list(found.shape)} are no {kind.name} blocks")
    length = prod(found.shape) // block * size
    if found.offset + length > len(file.data):
        raise ModelFileError(
            f"{file.path}: truncated: tensor {found.name} ends at byte {found.offset + length} of {len(file.data)}"
        )
    raw = np.frombuffer(file.data, np.uint8, length, found.offset).reshape(*found.shape[:-1], -1)
    try:
        values = quants.dequantize(raw, kind)
    except NotImplementedError:
        raise ModelFileError(f"{file.path}: tensor {found.name}: {kind.name} cannot be dequantized") from None
    return torch.from_numpy(np.require(values.reshape(found.shape), np.float32, ["C", "W"]))


def read_config(file: GgufFile) -> ModelConfig:
    """Raises ModelFileError naming the file and the key that is missing or not supported."""
    family = file.need("general.architecture", str)
    if family not in ARCHITECTURES:
        raise ModelFileError(f"{file.path}: architecture {family} is not supported ({', '.join(ARCHITECTURES)} are)")
    if file.get(f"{family}.expert_count", int):
        raise ModelFileError(f"{file.path}: {family}.expert_count: mixtures of experts are not supported")
    heads = file.need(f"{family}.attention.head_count", int)
    hidden = file.need(f"{family}.embedding_length", int)
    head_dim = file.get(f"{family}.attention.key_length", int) or hidden // max(heads, 1)
    _check_head_dim(file, family, head_dim)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelFileError(f"{file.path}: tensor token_embd.weight is missing")
    return ModelConfig(
        family=family,
        vocab_size=embedding.shape[0],
        hidden=hidden,
        intermediate=file.need(f"{family}.feed_forward_length", int),
        layers=file.need(f"{family}.block_count", int),
        heads=heads,
        kv_heads=file.get(f"{family}.attention.head_count_kv", int) or heads,
        head_dim=head_dim,
        rope_theta=file.get(f"{family}.rope.freq_base", float) or 10000.0,
        max_positions=file.need(f"{family}.context_length", int),
        eos_token_ids=eos_token_ids(file),
        rope=_rope(file, family, head_dim),
        rms_eps=file.need(f"{family}.attention.layer_norm_rms_epsilon", float),
        tied="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        bos=file.get("tokenizer.ggml.bos_token_id", int),
    )


def _check_head_dim(file: GgufFile, family: str, head_dim: int) -> None:
    for key in (f"{family}.attention.value_length", f"{family}.rope.dimension_count"):
        value = file.get(key, int)
        if value is not None and value != head_dim:
            raise ModelFileError(f"{file.path}: {key} is {value}; only the head size, {head_dim}, is supported")


def _rope(file: GgufFile, family: str, head_dim: int) -> RopeScaling:
    """llama.cpp writes Llama 3's scaling as a tensor of divisors."""
    kind = file.get(f"{family}.rope.scaling.type", str) or "none"
    divisors = file.tensors.get("rope_freqs.weight")
    if kind not in ("none", "linear") or (kind == "linear" and divisors is not None):
        raise ModelFileError(f"{file.path}: rope scaling {kind} is not supported (none, linear, rope_freqs are)")
    if kind == "linear":
        return RopeScaling("linear", file.need(f"{family}.rope.scaling.factor", float))
    if divisors is None:
        return RopeScaling()
    if divisors.shape != (head_dim // 2,):
        raise ModelFileError(f"{file.path}: rope_freqs.weight has shape {list(divisors.shape)}, not [{head_dim // 2}]")
    return RopeScaling("factors", factors=tuple(dequantize(file, divisors).tolist()))


def _half_split(tensor: Tensor, heads: int) -> Tensor:
    """llama.cpp interleaves the two halves of each rotary head (arch llama only); back to Hugging Face's order."""
    if tensor.shape[0] % (2 * heads):
        return tensor
    parts = tensor.view(heads, tensor.shape[0] // heads // 2, 2, *tensor.shape[1:])
    return parts.transpose(1, 2).reshape(tensor.shape)
