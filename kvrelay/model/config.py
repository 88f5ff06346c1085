"""The shape of a Llama-family decoder. Knows no file format and no torch."""

from dataclasses import dataclass, field
from typing import Literal

RopeKind = Literal["default", "linear", "llama3", "factors"]


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies differ from theta ** (-2i / head_dim)."""

    kind: RopeKind = "default"
    factor: float = 1.0
    """linear: every frequency is divided by it; llama3: the low ones are."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    factors: tuple[float, ...] = ()
    """factors (GGUF's rope_freqs tensor): head_dim / 2 divisors."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything but the weights."""

    family: str
    """"llama", "qwen2" or "qwen3"."""
    vocab_size: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float
    max_positions: int
    """Longest context, in tokens."""
    eos_token_ids: tuple[int, ...]
    rope: RopeScaling = field(default_factory=RopeScaling)
    rms_eps: float = 1e-5
    tied: bool = False
    """The output matrix is the embedding matrix."""
    qkv_bias: bool = False
    qk_norm: bool = False
    """RMS norm over each head of q and k, before the rotation."""
    bos: int | None = None

    @property
    def rope_text(self) -> str:
        """Canonical text of the rope settings, for the layout fingerprint."""
        scaling = self.rope
        base = f"{scaling.kind} theta={self.rope_theta!r}"
        match scaling.kind:
            case "default":
                return base
            case "linear":
                return f"{base} factor={scaling.factor!r}"
            case "llama3":
                return (
                    f"{base} factor={scaling.factor!r} low={scaling.low_freq_factor!r}"
                    f" high={scaling.high_freq_factor!r} original={scaling.original_max_positions}"
                )
            case "factors":
                return f"{base} factors={','.join(repr(one) for one in scaling.factors)}"
