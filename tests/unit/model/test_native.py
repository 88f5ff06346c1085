"""Where compiled kernels run and where they are kept, on machines that this one is not."""

import errno
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from llvmlite import binding

from kvrelay.model import native


@pytest.mark.parametrize(
    ("features", "rows"), [(["fma", "avx512f"], 32), (["fma", "avx2"], 4), (["neon"], 4), (["sse2"], 0)]
)
def test_the_compiled_step_takes_as_many_rows_as_the_cpus_vectors_bear(
    features: list[str], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(binding, "get_host_cpu_features", lambda: dict.fromkeys(features, True))
    assert native.few_rows() == rows


def test_torchs_threads_are_not_given_up_where_its_openmp_is_not_found(
    monkeypatch: pytest.MonkeyPatch, fallbacks_taken: Counter[str]
) -> None:
    monkeypatch.setattr(native, "_openmp", lambda: None)
    monkeypatch.setattr(binding, "get_host_cpu_features", lambda: {"avx512f": True})
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert native.few_rows() == 0
    assert fallbacks_taken == {"no_openmp": 1}
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert native.few_rows() == 32


def test_kernels_that_cannot_be_kept_in_the_cache_folder_are_kept_in_the_temporary_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fallbacks_taken: Counter[str],
) -> None:
    made, parents = native._made, []

    def full(parent: Path, make: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        parents.append(parent)
        if len(parents) == 1:
            raise OSError(errno.ENOSPC, "no space left on device")
        return made(parent, make)

    monkeypatch.setattr(native, "_made", full)
    assert native.kernels.__wrapped__(torch.float64, str(tmp_path))
    assert parents[0] == tmp_path / "kernels"
    assert parents[1] != parents[0]
    assert "no space left" in caplog.text
    assert fallbacks_taken == {"kernels_not_kept": 1}


def test_tiles_that_the_system_does_not_grant_are_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fallbacks_taken: Counter[str]
) -> None:
    monkeypatch.setattr(binding, "get_host_cpu_features", lambda: {"amx-tile": True, "amx-bf16": True})
    monkeypatch.setattr(native, "_TILE_DATA", 63)
    assert not native.tiles.__wrapped__()
    assert "not granted" in caplog.text
    assert fallbacks_taken == {"amx_not_granted": 1}


@pytest.mark.parametrize("features", [{}, {"amx-tile": True}, {"amx-bf16": True, "amx-tile": False}])
def test_a_cpu_without_tiles_for_bfloat16_is_not_asked_for_them(
    features: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(binding, "get_host_cpu_features", lambda: features)
    assert not native.tiles.__wrapped__()
