"""Rotary position embedding, half-split as in Hugging Face's Llama. Knows no layers."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvrelay.model.config import ModelConfig, RopeScaling


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosines and signed sines of one step's positions, [T, 1, head_dim]."""

    cos: Tensor
    signed_sin: Tensor
    """-sin for the first half, +sin for the second, so that one roll of x makes the partner of each element."""

    def apply(self, x: Tensor) -> Tensor:
        """Rotates x [T, heads, head_dim]."""
        return torch.addcmul(x * self.cos, x.roll(x.shape[-1] // 2, -1), self.signed_sin)


class Rope:
    """Turns positions into rotations. Angles are computed in float64, so every device gets the same ones."""

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        self._frequencies = frequencies(config).to(device)
        self._dtype = dtype

    def at(self, positions: Tensor) -> Rotation:
        """The rotation for positions i64[T]."""
        angles = torch.outer(positions.double(), self._frequencies)[:, None]
        cos, sin = angles.cos(), angles.sin()
        return Rotation(torch.cat((cos, cos), -1).to(self._dtype), torch.cat((-sin, sin), -1).to(self._dtype))


def frequencies(config: ModelConfig) -> Tensor:
    """Radians per position, f64[head_dim / 2], scaled as the config says."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    plain = config.rope_theta**-exponents
    match config.rope.kind:
        case "default":
            return plain
        case "linear":
            return plain / config.rope.factor
        case "llama3":
            return _llama3(plain, config.rope)
        case "factors":
            return plain / torch.tensor(config.rope.factors, dtype=torch.float64)


def _llama3(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1: long wavelengths are divided by the factor, short ones kept, those between blended."""
    turns = scaling.original_max_positions * plain / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0, 1)
    return kept * plain + (1 - kept) * plain / scaling.factor
