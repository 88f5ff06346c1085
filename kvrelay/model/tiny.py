"""A tiny deterministic Llama-like model, made in memory, for tests and first tries. Knows no files."""

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor

from kvrelay.model.config import ModelConfig

CONFIG = ModelConfig(
    family="llama",
    vocab_size=264,
    hidden=32,
    intermediate=64,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    rope_theta=10000.0,
    max_positions=4096,
    eos_token_ids=(257,),
    bos=256,
)
"""Bytes 0..255, then eight specials; kvrelay/text/tiny.py names them."""


class TinyWeights:
    """Seeded random tensors, scaled so that greedy answers wander and most bytes are printable ASCII."""

    where = "tiny"

    def __init__(self, seed: int = 12) -> None:
        self._seed = seed

    def tensor(self, name: str) -> Tensor | None:
        """f64, a pure function of seed and name."""
        shape = _shape(name)
        if shape is None:
            return None
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.float64)
        digest = hashlib.blake2b(f"{self._seed}/{name}".encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
        return torch.randn(shape, dtype=torch.float64, generator=generator) * _scale(name)


def open_tiny() -> tuple[ModelConfig, TinyWeights, str]:
    """Config, weights and the identity of both."""
    weights = TinyWeights()
    digest = hashlib.blake2b(repr(CONFIG).encode(), digest_size=16)
    for name in _names():
        tensor = weights.tensor(name)
        assert tensor is not None
        digest.update(tensor.numpy().tobytes())
    return CONFIG, weights, digest.hexdigest()


def _names() -> Iterator[str]:
    yield from ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
    for layer in range(CONFIG.layers):
        yield from (f"model.layers.{layer}.self_attn.{part}_proj.weight" for part in "qkvo")
        yield from (f"model.layers.{layer}.mlp.{part}_proj.weight" for part in ("gate", "up", "down"))


def _shape(name: str) -> tuple[int, ...] | None:
    config, part = CONFIG, name.removesuffix(".weight").rsplit(".", 1)[-1]
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens": (config.vocab_size, config.hidden),
        "lm_head": (config.vocab_size, config.hidden),
        "q_proj": (q, config.hidden),
        "k_proj": (kv, config.hidden),
        "v_proj": (kv, config.hidden),
        "o_proj": (config.hidden, q),
        "gate_proj": (config.intermediate, config.hidden),
        "up_proj": (config.intermediate, config.hidden),
        "down_proj": (config.hidden, config.intermediate),
        "input_layernorm": (config.hidden,),
        "post_attention_layernorm": (config.hidden,),
        "norm": (config.hidden,),
    }
    return shapes.get(part)


def _scale(name: str) -> Tensor:
    """Projections keep the norm of what they are given; attention looks sharply; printable bytes are likelier."""
    shape = _shape(name)
    assert shape is not None
    if "embed_tokens" in name:
        return torch.tensor(1.0, dtype=torch.float64)
    if "lm_head" in name:
        scale = torch.full((shape[0], 1), 0.3, dtype=torch.float64)
        scale[32:127] = 0.6
        scale[CONFIG.eos_token_ids[0]] = 0.6
        return scale
    gain = 2.0 if "q_proj" in name or "k_proj" in name or "o_proj" in name else 1.5
    return torch.tensor(gain / shape[1] ** 0.5, dtype=torch.float64)
