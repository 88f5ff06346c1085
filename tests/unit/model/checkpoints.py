"""Small random checkpoints of each family, made by the reference implementation and saved in both forms."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from torch import Tensor

SHAPE = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.15,
    "eos_token_id": 7,
}
FAMILIES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def reference(family: str, **overrides: Any) -> Any:
    """A random model of the reference implementation; biases and norms random too."""
    make_config, make_model = FAMILIES[family]
    if family == "qwen3":
        overrides = {"head_dim": 24, **overrides}
    torch.manual_seed(11)
    model = make_model(make_config(**{**SHAPE, **overrides})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.normal_(1.0 if parameter.mean() > 0.5 else 0.0, 0.3)
    return model


def reference_logits(model: Any, ids: list[int]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([ids])).logits[0]
    return logits


def save(model: Any, directory: Path, **options: Any) -> Path:
    """As Hugging Face saves it: config.json, generation_config.json, safetensors (max_shard_size: shards)."""
    model.save_pretrained(directory, **options)
    return directory


def edit_json(path: Path, **changes: Any) -> None:
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, **changes}))


def save_gguf(model: Any, path: Path, kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32) -> Path:
    """As llama.cpp's converter writes it: its names, its q and k order for arch llama; matrices in `kind`.

    The model's own weights are replaced by what `kind` keeps of them.
    """
    config = model.config
    family = config.model_type
    writer = gguf.GGUFWriter(path, family)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(model.model.layers[0].self_attn.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_eos_token_id(config.eos_token_id)
    names = gguf.get_tensor_name_map(_architecture(family), config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, suffix = name.rsplit(".", 1)
        stored = gguf.GGMLQuantizationType.F32 if tensor.ndim == 1 else kind
        raw = gguf.quants.quantize(_ordered(family, name, tensor.numpy(), config), stored)
        writer.add_tensor(f"{names.get_name(stem)}.{suffix}", raw, raw_dtype=stored)
        kept = gguf.quants.dequantize(gguf.quants.quantize(tensor.numpy(), stored), stored)
        tensor.copy_(torch.from_numpy(kept.reshape(tensor.shape)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _architecture(family: str) -> gguf.MODEL_ARCH:
    return next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == family)


def _ordered(family: str, name: str, values: np.ndarray[Any, Any], config: Any) -> np.ndarray[Any, Any]:
    """llama.cpp's converter turns each rotary head from two halves into pairs."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for part, count in heads.items():
        if family == "llama" and part in name:
            halves = values.reshape(count, 2, -1, *values.shape[1:])
            return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
    return values
