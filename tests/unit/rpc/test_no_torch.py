"""The router's rooms never load torch."""

import subprocess
import sys

ROOMS = """
import importlib, pkgutil, sys
for name in ("kvrelay.rpc", "kvrelay.index", "kvrelay.telemetry"):
    package = importlib.import_module(name)
    for module in pkgutil.iter_modules(package.__path__, name + "."):
        importlib.import_module(module.name)
importlib.import_module("kvrelay.kvcache.hashing")
assert "torch" not in sys.modules, "torch was imported"
assert "numpy" not in sys.modules, "numpy was imported"
"""


def test_rpc_index_telemetry_and_block_hashing_do_without_torch() -> None:
    done = subprocess.run([sys.executable, "-c", ROOMS], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
