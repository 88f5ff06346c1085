"""Converted weights are read back as they were written, survive racing writers, and are replaced when damaged."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvrelay.errors import ModelFileError
from kvrelay.model.linear import stacked
from kvrelay.model.stored import StoredWeights, stored, write

TENSORS = {"a": torch.arange(12, dtype=torch.float32).view(3, 4), "b": torch.full((5,), 2.5)}


class Origin:
    """A checkpoint that counts how often it is asked."""

    where = "origin"

    def __init__(self) -> None:
        self.asked: list[str] = []

    def names(self) -> list[str]:
        return list(TENSORS)

    def tensor(self, name: str) -> Tensor | None:
        self.asked.append(name)
        return TENSORS.get(name)


def store(folder: Path) -> Path:
    with stored(Origin(), "id", folder):
        return folder / "id.f32"


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def test_what_was_written_is_read_without_asking_the_checkpoint(tmp_path: Path) -> None:
    store(tmp_path)
    origin = Origin()
    with stored(origin, "id", tmp_path) as source:
        assert isinstance(source, StoredWeights)
        for name, tensor in TENSORS.items():
            found = source.tensor(name)
            assert found is not None and torch.equal(found, tensor)
    assert origin.asked == []
    assert files(tmp_path) == ["id.f32"]


def test_tensors_written_one_after_the_other_are_one_piece_of_memory(tmp_path: Path) -> None:
    parts = {"a": torch.rand(4, 16), "b": torch.rand(2, 16)}

    class Two(Origin):
        def names(self) -> list[str]:
            return list(parts)

        def tensor(self, name: str) -> Tensor | None:
            return parts.get(name)

    with stored(Two(), "id", tmp_path) as source:
        found = [one for name in parts if (one := source.tensor(name)) is not None]
        both = stacked(found)
        assert both.data_ptr() == found[0].data_ptr() and torch.equal(both, torch.cat(list(parts.values())))


def test_a_tensor_that_was_not_written_comes_from_the_checkpoint(tmp_path: Path) -> None:
    store(tmp_path)
    origin = Origin()
    with stored(origin, "id", tmp_path) as source:
        assert source.tensor("c") is None
    assert origin.asked == ["c"]


def test_a_damaged_tensor_comes_from_the_checkpoint_and_the_file_goes(
    tmp_path: Path, fallbacks_taken: Counter[str]
) -> None:
    path = store(tmp_path)
    data = bytearray(path.read_bytes())
    data[data.index(TENSORS["b"].numpy().tobytes())] ^= 1
    path.write_bytes(data)
    origin = Origin()
    with stored(origin, "id", tmp_path) as source:
        assert source.tensor("b") is TENSORS["b"]
    assert origin.asked == ["b"] and not path.exists()
    assert fallbacks_taken == {"weights_damaged": 1}


@pytest.mark.parametrize("keep", [0, 5, 40, -1])
def test_a_truncated_file_is_written_anew(tmp_path: Path, keep: int, fallbacks_taken: Counter[str]) -> None:
    path = store(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[:keep])
    store(tmp_path)
    assert path.read_bytes() == whole
    assert fallbacks_taken == {"weights_unreadable": 1}


def test_two_writers_at_once_leave_one_sound_file(tmp_path: Path) -> None:
    path = tmp_path / "id.f32"
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: write(path, Origin()), range(8)))
    assert files(tmp_path) == ["id.f32"]
    assert StoredWeights(path, Origin()).tensor("a") is not None


class Broken(Origin):
    """A checkpoint that cannot be read to its end."""

    def tensor(self, name: str) -> Tensor | None:
        if name == "b":
            raise ModelFileError("b")
        return super().tensor(name)


def test_a_checkpoint_that_fails_stores_nothing(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError), stored(Broken(), "id", tmp_path):
        pass
    assert files(tmp_path) == []


def test_a_folder_that_cannot_be_written_costs_nothing_but_the_file(
    tmp_path: Path, fallbacks_taken: Counter[str]
) -> None:
    with stored(Origin(), "id", tmp_path / "missing") as source:
        assert source.tensor("a") is TENSORS["a"]
    assert fallbacks_taken == {"weights_not_stored": 1, "no_lock": 1}
    with stored(Origin(), "id", None) as source:
        assert source.tensor("a") is TENSORS["a"]
