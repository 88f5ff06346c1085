"""Opens a checkpoint and makes the model of it. Knows which form each kind has, nothing of how the model runs."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from kvrelay import checkpoint
from kvrelay.cache_folder import cache_folder
from kvrelay.checkpoint import Checkpoint
from kvrelay.errors import ModelFileError
from kvrelay.model import tiny
from kvrelay.model.config import ModelConfig
from kvrelay.model.gguf import GgufWeights, open_gguf_model
from kvrelay.model.huggingface import open_huggingface_model
from kvrelay.model.source import WeightSource
from kvrelay.model.stored import stored
from kvrelay.model.transformer import Transformer
from kvrelay.types import LayoutFingerprint

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.float32,
}
"""What is computed in; with int8 it is the weights that are."""

_STORED_BYTES = 16 * 1024 * 1024
"""GGUF files of this size or more are converted once and kept."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, with what others must know of it."""

    model: Transformer
    config: ModelConfig
    layout: LayoutFingerprint


def load_model(
    model: str, *, device: str = "cpu", dtype: str = "", block_tokens: int = 16, cache_dir: str = ""
) -> LoadedModel:
    """Loads "tiny", "smollm2", a Hugging Face directory or a .gguf file.

    dtype: "float32", "float64", "bfloat16", "float16", or on the CPU "int8": weights in int8 with a scale for each
    output channel, everything else in float32; empty: float64 for tiny, else float32 on the CPU and bfloat16 on cuda.
    cache_dir: of compiled kernels and converted weights; empty: the user's cache. Raises ModelFileError: missing,
    corrupt or truncated files, unsupported architecture, rope or dtype.
    """
    found = checkpoint.resolve(model)
    dtype = dtype or default_dtype(found, device)
    if dtype not in DTYPES:
        raise ModelFileError(f"dtype: {dtype} is not one of {', '.join(DTYPES)}")
    if dtype == "int8" and device != "cpu":
        raise ModelFileError(f"dtype: int8 runs on the CPU only, not on {device}")
    config, source, identity = _open(found)
    with _kept(found, source, identity, cache_dir) as tensors:
        built = Transformer(config, tensors, torch.device(device), DTYPES[dtype], cache_dir, int8=dtype == "int8")
    layout = LayoutFingerprint(
        weights=identity,
        layers=config.layers,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        block_tokens=block_tokens,
        dtype=dtype,
        rope=config.rope_text,
    )
    return LoadedModel(built, config, layout)


def default_dtype(found: Checkpoint, device: str) -> str:
    """What a model runs in if nobody says."""
    if found.kind == "tiny":
        return "float64"
    return "float32" if device == "cpu" else "bfloat16"


def _kept(
    found: Checkpoint, source: WeightSource, identity: str, cache_dir: str
) -> AbstractContextManager[WeightSource]:
    """Safetensors are mapped as they are, and a small GGUF is converted in no time."""
    if isinstance(source, GgufWeights) and found.directory.stat().st_size >= _STORED_BYTES:
        return stored(source, identity, cache_folder("weights", cache_dir))
    return nullcontext(source)


def _open(found: Checkpoint) -> tuple[ModelConfig, WeightSource, str]:
    """Config, tensors, and a hex digest that is equal exactly if config and weights are."""
    if found.kind == "tiny":
        return tiny.open_tiny()
    if found.kind == "gguf":
        return open_gguf_model(found.directory)
    return open_huggingface_model(found.directory)
