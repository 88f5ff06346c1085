"""The router as a program: what it imports, and how it refuses to start."""

import subprocess
import sys


def test_the_router_never_imports_torch() -> None:
    code = "import services.router.__main__, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=60)


def test_bad_flags_are_named_in_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "services.router", "--drain-s=-1"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "drain_s" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_missing_model_is_named() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "services.router", "--model=/no/such/model", "--listen=127.0.0.1:0"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "/no/such/model" in done.stderr
