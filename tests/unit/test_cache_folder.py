"""What can be made again is kept where only this user can write, and made by one process at a time."""

import os
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest

from kvrelay.cache_folder import cache_folder, exclusive, temporary_folder


def test_the_chosen_folder_comes_before_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder("kernels", str(tmp_path / "chosen")) == tmp_path / "chosen/kernels"
    assert cache_folder("kernels") == tmp_path / "xdg/kvrelay/kernels"
    assert (tmp_path / "xdg/kvrelay/kernels").stat().st_mode & 0o777 == 0o700


def test_a_folder_that_others_can_write_is_not_used(tmp_path: Path, fallbacks_taken: Counter[str]) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels").chmod(0o777)
    assert cache_folder("kernels", str(tmp_path)) is None
    assert fallbacks_taken == {"no_cache_folder": 1}


def test_a_folder_that_cannot_be_made_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert cache_folder("kernels", str(tmp_path / "file")) is None


def test_the_temporary_folder_is_this_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    found = temporary_folder("kernels")
    assert found == tmp_path / f"kvrelay-{os.getuid()}/kernels"
    found.chmod(0o777)
    assert temporary_folder("kernels") not in (found, None)


def test_one_at_a_time_is_inside(tmp_path: Path) -> None:
    inside, order = threading.Event(), []

    def other() -> None:
        inside.wait()
        with exclusive(tmp_path):
            order.append("other")

    thread = threading.Thread(target=other)
    thread.start()
    with exclusive(tmp_path):
        inside.set()
        thread.join(0.05)
        order.append("first")
    thread.join()
    assert order == ["first", "other"]


def test_one_that_never_leaves_holds_nobody_up_for_ever(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fallbacks_taken: Counter[str],
) -> None:
    monkeypatch.setattr("kvrelay.cache_folder.TURN_S", 0.1)
    with exclusive(tmp_path), exclusive(tmp_path):
        assert "not locked" in caplog.text
    with exclusive(tmp_path / "missing"):
        assert "no lock" in caplog.text
    assert fallbacks_taken == {"no_lock": 2}


def test_kernels_run_without_a_home_of_their_own(tmp_path: Path) -> None:
    """As in a container: nothing but the temporary folder can be written."""
    code = (
        "import torch; torch.set_num_threads(1);"
        "from kvrelay.model.native import kernels; print(sorted(kernels(torch.float64)))"
    )
    env = {"HOME": "/proc/nowhere", "TMPDIR": str(tmp_path), "PATH": os.environ["PATH"]}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['attention', 'piece']"
    assert list(tmp_path.rglob("*.nbi"))
