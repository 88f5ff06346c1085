"""Logits equal the reference implementation's for checkpoints that it saved; the rest is refused by name."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from kvrelay.errors import ModelFileError
from kvrelay.model.weights import load_model
from tests.unit.model import checkpoints
from tests.unit.model.paging import one_shot

IDS = [(17 * i + 5) % 160 for i in range(150)]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good checkpoint; copy it before breaking it."""
    return checkpoints.save(checkpoints.reference("llama"), tmp_path_factory.mktemp("llama"))


@pytest.fixture
def broken(llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama, tmp_path / "broken"))


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
        ("llama", {"rope_parameters": checkpoints.LLAMA3_ROPE}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.5}}),
        ("llama", {"head_dim": 32, "num_key_value_heads": 1}),
        ("qwen2", {}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {}),
        ("qwen3", {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    ],
)
def test_logits_equal_the_reference(family: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    reference = checkpoints.reference(family, **overrides)
    loaded = load_model(str(checkpoints.save(reference, tmp_path)))
    wanted = checkpoints.reference_logits(reference, IDS)
    assert wanted.std() > 0.5
    torch.testing.assert_close(one_shot(loaded.model, IDS), wanted, rtol=0, atol=1e-4)
    assert loaded.config.eos_token_ids == (7,) and loaded.config.family == family


def test_shards_equal_a_single_file(tmp_path: Path) -> None:
    reference = checkpoints.reference("llama")
    directory = checkpoints.save(reference, tmp_path, max_shard_size="60KB")
    assert len(list(directory.glob("model-*.safetensors"))) > 2
    wanted = checkpoints.reference_logits(reference, IDS)
    torch.testing.assert_close(one_shot(load_model(str(directory)).model, IDS), wanted, rtol=0, atol=1e-4)


def test_bfloat16_files_are_widened(tmp_path: Path) -> None:
    reference = checkpoints.reference("qwen3").bfloat16()
    directory = checkpoints.save(reference, tmp_path)
    wanted = checkpoints.reference_logits(type(reference).from_pretrained(directory, dtype=torch.float32), IDS)
    torch.testing.assert_close(one_shot(load_model(str(directory)).model, IDS), wanted, rtol=0, atol=1e-4)


def test_rope_scaling_as_older_files_write_it(llama: Path, tmp_path: Path) -> None:
    reference = checkpoints.reference("llama", rope_parameters=checkpoints.LLAMA3_ROPE)
    directory = checkpoints.save(reference, tmp_path)
    old = {key: value for key, value in checkpoints.LLAMA3_ROPE.items() if key != "rope_theta"}
    checkpoints.edit_json(directory / "config.json", rope_parameters=None, rope_scaling=old, rope_theta=10000.0)
    wanted = checkpoints.reference_logits(reference, IDS)
    loaded = load_model(str(directory))
    torch.testing.assert_close(one_shot(loaded.model, IDS), wanted, rtol=0, atol=1e-4)
    assert loaded.layout.rope != load_model(str(llama)).layout.rope


def test_identity_follows_the_weights(broken: Path) -> None:
    from safetensors.torch import load_file, save_file

    before = load_model(str(broken)).layout
    assert load_model(str(broken)).layout == before
    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"][3] += 0.001
    save_file(weights, broken / "model.safetensors")
    difference = load_model(str(broken)).layout.difference(before)
    assert difference is not None and difference.startswith("weights:")


def test_generation_config_names_several_ends(broken: Path) -> None:
    (broken / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert load_model(str(broken)).config.eos_token_ids == (7, 9)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "factor"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": -1}, "num_hidden_layers"),
        ({"hidden_size": 128}, "model.embed_tokens.weight"),
        ({"num_hidden_layers": 4}, "model.layers.3"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused_by_name(broken: Path, changes: dict[str, Any], named: str) -> None:
    checkpoints.edit_json(broken / "config.json", **changes)
    with pytest.raises(ModelFileError, match=named) as refused:
        load_model(str(broken))
    assert str(broken) in str(refused.value)


def test_a_truncated_file_is_refused(broken: Path) -> None:
    path = broken / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelFileError, match="model.safetensors: corrupt or truncated"):
        load_model(str(broken))


@pytest.mark.parametrize("content", [b"", b"not a safetensors file at all", b"\xff" * 64])
def test_garbage_is_refused(broken: Path, content: bytes) -> None:
    (broken / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelFileError, match="model.safetensors"):
        load_model(str(broken))


def test_missing_weights_and_missing_shards_are_refused(broken: Path) -> None:
    (broken / "model.safetensors").unlink()
    with pytest.raises(ModelFileError, match="neither model.safetensors nor"):
        load_model(str(broken))
    (broken / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-1-of-2.safetensors"}}))
    with pytest.raises(ModelFileError, match="model-1-of-2.safetensors"):
        load_model(str(broken))
    (broken / "model.safetensors.index.json").write_text("{")
    with pytest.raises(ModelFileError, match="not readable as JSON"):
        load_model(str(broken))


def test_weights_that_are_not_finite_are_refused(broken: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(broken / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(weights, broken / "model.safetensors")
    with pytest.raises(ModelFileError, match="up_proj.weight holds values that are not finite"):
        load_model(str(broken))


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ModelFileError, match="int3"):
        load_model("tiny", dtype="int3")
