"""The router as a program: what it imports. How it refuses to start: tests/unit/test_program.py."""

import subprocess
import sys


def test_the_router_never_imports_torch() -> None:
    code = "import services.router.__main__, services.router.app, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=60)
