"""A Hugging Face directory -> config and tensors. Knows config.json and safetensors; nothing of text."""

import hashlib
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvrelay.checkpoint import eos_token_ids, read_json
from kvrelay.errors import ModelFileError
from kvrelay.model.config import ModelConfig, RopeScaling

ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}


class SafetensorsWeights:
    """The tensors of one safetensors file, or of the shards that an index names."""

    def __init__(self, directory: Path) -> None:
        """Opens every file. Raises ModelFileError: missing, corrupt or truncated."""
        self._directory = directory
        self.files = weight_files(directory)
        self._held_by: dict[str, Any] = {}
        self._stack = ExitStack()
        for path in self.files:
            opened = self._stack.enter_context(_open(path))
            self._held_by.update(dict.fromkeys(opened.keys(), opened))

    @property
    def where(self) -> str:
        return str(self._directory)

    def tensor(self, name: str) -> Tensor | None:
        """The tensor in the file's dtype, in memory of its own. Raises ModelFileError if it cannot be read."""
        opened = self._held_by.get(name)
        if opened is None:
            return None
        try:
            tensor: Tensor = opened.get_tensor(name).clone()
        except (SafetensorError, OSError, RuntimeError) as error:
            raise ModelFileError(f"{self.where}: tensor {name} cannot be read: {error}") from error
        return tensor

    def identity(self) -> str:
        """Digest over config.json and all weight files."""
        digest = hashlib.blake2b(digest_size=16)
        for path in (self._directory / "config.json", *self.files):
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "blake2b").digest())
        return digest.hexdigest()


def open_huggingface_model(directory: Path) -> tuple[ModelConfig, SafetensorsWeights, str]:
    """Config, tensors and their identity. Raises ModelFileError."""
    config = read_config(directory)
    weights = SafetensorsWeights(directory)
    return config, weights, weights.identity()


def weight_files(directory: Path) -> list[Path]:
    """model.safetensors, or the shards of model.safetensors.index.json. Raises ModelFileError if one is missing."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if not index.exists():
        raise ModelFileError(f"{directory}: holds neither {single.name} nor {index.name}")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFileError(f"{index}: weight_map is missing")
    paths = [directory / str(name) for name in sorted(set(weight_map.values()))]
    for path in paths:
        if path.parent != directory or not path.exists():
            raise ModelFileError(f"{path}: named by {index.name}, but missing")
    return paths


def read_config(directory: Path) -> ModelConfig:
    """config.json and generation_config.json. Raises ModelFileError naming the file and the field."""
    raw = _Fields(directory / "config.json")
    architecture = _architecture(raw)
    _refuse_what_is_not_supported(raw)
    heads, hidden = raw.integer("num_attention_heads"), raw.integer("hidden_size")
    rope_theta, rope = _rope(raw)
    return ModelConfig(
        family=ARCHITECTURES[architecture],
        vocab_size=raw.integer("vocab_size"),
        hidden=hidden,
        intermediate=raw.integer("intermediate_size"),
        layers=raw.integer("num_hidden_layers"),
        heads=heads,
        kv_heads=raw.integer("num_key_value_heads", heads),
        head_dim=raw.integer("head_dim", hidden // heads),
        rope_theta=rope_theta,
        max_positions=raw.integer("max_position_embeddings"),
        eos_token_ids=eos_token_ids(directory),
        rope=rope,
        rms_eps=raw.number("rms_norm_eps", 1e-6),
        tied=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=architecture == "Qwen2ForCausalLM",
        qk_norm=architecture == "Qwen3ForCausalLM",
        bos=bos if isinstance(bos := raw.get("bos_token_id"), int) else None,
    )


class _Fields:
    """config.json, with errors that name the field."""

    def __init__(self, path: Path, values: Mapping[str, Any] | None = None) -> None:
        self.path = path
        self._values = read_json(path) if values is None else values

    def get(self, name: str, default: Any = None) -> Any:
        """The value; default if it is missing or null."""
        value = self._values.get(name)
        return default if value is None else value

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.get(name, default)
        if not isinstance(value, int) or value < 1:
            raise ModelFileError(f"{self.path}: {name} is {value!r}, not a positive integer")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name, default)
        if not isinstance(value, int | float) or not value > 0:
            raise ModelFileError(f"{self.path}: {name} is {value!r}, not a positive number")
        return float(value)

    def within(self, name: str) -> "_Fields":
        values = self.get(name, {})
        if not isinstance(values, dict):
            raise ModelFileError(f"{self.path}: {name} is {values!r}, not an object")
        return _Fields(self.path, values)


def _architecture(raw: _Fields) -> str:
    named = raw.get("architectures") or [raw.get("model_type", "none")]
    for one in named if isinstance(named, list) else [named]:
        if one in ARCHITECTURES:
            return str(one)
    raise ModelFileError(f"{raw.path}: architectures: {named} is not supported ({', '.join(ARCHITECTURES)} are)")


def _refuse_what_is_not_supported(raw: _Fields) -> None:
    for name in ("attention_bias", "mlp_bias", "use_sliding_window", "quantization_config"):
        if raw.get(name):
            raise ModelFileError(f"{raw.path}: {name} is not supported")
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelFileError(f"{raw.path}: hidden_act {raw.get('hidden_act')} is not supported (silu is)")
    other = sorted({str(kind) for kind in raw.get("layer_types", [])} - {"full_attention"})
    if other:
        raise ModelFileError(f"{raw.path}: layer_types {', '.join(other)} is not supported (full_attention is)")


def _rope(raw: _Fields) -> tuple[float, RopeScaling]:
    """theta and scaling, as transformers 5 writes them (rope_parameters) or as version 4 did (rope_scaling)."""
    fields = raw.within("rope_parameters" if raw.get("rope_parameters") else "rope_scaling")
    theta = fields.number("rope_theta", raw.number("rope_theta", 10000.0))
    kind = fields.get("rope_type", fields.get("type", "default"))
    if fields.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelFileError(f"{raw.path}: partial_rotary_factor is not supported")
    if kind == "default":
        return theta, RopeScaling()
    if kind == "linear":
        return theta, RopeScaling("linear", fields.number("factor"))
    if kind != "llama3":
        raise ModelFileError(f"{raw.path}: rope scaling {kind} is not supported (default, linear, llama3 are)")
    return theta, RopeScaling(
        "llama3",
        fields.number("factor"),
        fields.number("low_freq_factor"),
        fields.number("high_freq_factor"),
        fields.integer("original_max_position_embeddings"),
    )


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelFileError(f"{path}: corrupt or truncated safetensors file: {error}") from error
