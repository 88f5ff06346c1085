"""GGUF files give the tensors of the reference library and the logits of the model that they were made of."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from kvrelay.errors import ModelFileError
from kvrelay.gguf_file import open_gguf
from kvrelay.model.gguf import dequantize
from kvrelay.model.weights import load_model
from tests.unit.model import checkpoints
from tests.unit.model.paging import one_shot

IDS = [(17 * i + 5) % 160 for i in range(100)]


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q8_0])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_logits_equal_the_reference_with_the_same_rounded_weights(family: str, kind: Kind, tmp_path: Path) -> None:
    tied = kind in (Kind.F32, Kind.Q4_0)
    reference = checkpoints.reference(family, tie_word_embeddings=tied, head_dim=32)
    path = checkpoints.save_gguf(reference, tmp_path / "model.gguf", kind)
    loaded = load_model(str(path))
    wanted = checkpoints.reference_logits(reference, IDS)
    torch.testing.assert_close(one_shot(loaded.model, IDS), wanted, rtol=0, atol=1e-4)
    assert loaded.config.tied == tied and loaded.config.eos_token_ids == (7,)


def write(
    path: Path, tensors: dict[str, tuple[np.ndarray[Any, Any], Kind]], arch: str = "llama", **values: Any
) -> Path:
    """Any GGUF file: raw tensors, and values as given."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in values.items():
        name = key.replace("__", ".")
        if isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        else:
            writer.add_uint32(name, value)
    for name, (raw, kind) in tensors.items():
        writer.add_tensor(name, raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", [Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ4_NL, Kind.Q5_1])
def test_every_block_format_is_read_as_the_library_reads_it(kind: Kind, tmp_path: Path) -> None:
    _, size = gguf.GGML_QUANT_SIZES[kind]
    block, _ = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(5).integers(0, 40, (3, 512 // block * size), np.uint8)
    path = write(tmp_path / "one.gguf", {"one": (raw, kind), "two": (np.ones(32, np.float32), Kind.F32)})
    (reference, _) = gguf.GGUFReader(path).tensors
    file = open_gguf(path)
    got = dequantize(file, file.tensors["one"])
    assert got.shape == (3, 512)
    np.testing.assert_array_equal(got.numpy(), gguf.quants.dequantize(reference.data, kind))


def test_q4_1_is_scale_times_nibble_plus_minimum(tmp_path: Path) -> None:
    scale, minimum = np.float16(0.5), np.float16(-3.25)
    nibbles = np.arange(16, dtype=np.uint8)
    raw = np.concatenate([np.array([scale, minimum]).view(np.uint8), nibbles | (nibbles[::-1] << 4)])[None]
    file = open_gguf(write(tmp_path / "one.gguf", {"one": (raw, Kind.Q4_1)}))
    wanted = np.concatenate([nibbles, nibbles[::-1]]) * 0.5 - 3.25
    np.testing.assert_array_equal(dequantize(file, file.tensors["one"]).numpy()[0], wanted)


def good_values() -> dict[str, Any]:
    return {
        "llama__embedding_length": 64,
        "llama__feed_forward_length": 96,
        "llama__block_count": 1,
        "llama__attention__head_count": 4,
        "llama__context_length": 128,
        "llama__attention__layer_norm_rms_epsilon": 1e-5,
    }


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"llama__rope__scaling__type": "yarn"}, "yarn"),
        ({"llama__expert_count": 8}, "experts"),
        ({"llama__rope__dimension_count": 8}, "rope.dimension_count"),
        ({"llama__attention__head_count": "four"}, "head_count is str, not int"),
        ({}, "blk.0.attn_norm.weight|input_layernorm"),
    ],
)
def test_a_file_that_cannot_be_served_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    tensors = {"token_embd.weight": (np.ones((10, 64), np.float32), Kind.F32)}
    path = write(tmp_path / "bad.gguf", tensors, **{**good_values(), **changes})
    with pytest.raises(ModelFileError, match=named) as refused:
        load_model(str(path))
    assert "bad.gguf" in str(refused.value)


@pytest.mark.parametrize("left_out", sorted(good_values()))
def test_a_missing_value_is_named(tmp_path: Path, left_out: str) -> None:
    tensors = {"token_embd.weight": (np.ones((10, 64), np.float32), Kind.F32)}
    values = {key: value for key, value in good_values().items() if key != left_out}
    path = write(tmp_path / "bad.gguf", tensors, **values)
    with pytest.raises(ModelFileError, match=left_out.replace("__", ".")):
        load_model(str(path))


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "bad.gguf", {}, arch="mamba")
    with pytest.raises(ModelFileError, match="architecture mamba is not supported"):
        load_model(str(path))


def test_a_file_cut_in_its_tensors_is_refused(tmp_path: Path) -> None:
    path = checkpoints.save_gguf(checkpoints.reference("llama"), tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(ModelFileError, match="truncated: tensor .* ends at byte"):
        load_model(str(path))


def test_llama3_scaling_comes_as_a_tensor_of_divisors(tmp_path: Path) -> None:
    from kvrelay.model.config import ModelConfig, RopeScaling
    from kvrelay.model.rope import frequencies

    def shape(rope: RopeScaling) -> ModelConfig:
        return ModelConfig("llama", 1, 1, 1, 1, 1, 1, 16, 10000.0, 1, (), rope)

    scaled = frequencies(shape(RopeScaling("llama3", 8.0, 1.0, 4.0, 64)))
    divisors = (frequencies(shape(RopeScaling())) / scaled).float().numpy()
    reference = checkpoints.reference("llama", rope_parameters=checkpoints.LLAMA3_ROPE)
    path = checkpoints.save_gguf(reference, tmp_path / "plain.gguf")
    file = open_gguf(path)
    tensors: dict[str, tuple[np.ndarray[Any, Any], Kind]] = {
        name: (dequantize(file, tensor).numpy(), Kind.F32) for name, tensor in file.tensors.items()
    }
    values = {key.replace(".", "__"): value for key, value in file.metadata.items() if key.startswith("llama.")}
    scaled_path = write(tmp_path / "scaled.gguf", {**tensors, "rope_freqs.weight": (divisors, Kind.F32)}, **values)
    loaded = load_model(str(scaled_path))
    assert loaded.config.rope.kind == "factors"
    wanted = checkpoints.reference_logits(reference, IDS)
    torch.testing.assert_close(one_shot(loaded.model, IDS), wanted, rtol=0, atol=1e-4)
    assert loaded.layout.rope != load_model(str(path)).layout.rope
