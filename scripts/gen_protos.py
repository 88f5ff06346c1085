"""Generate the gRPC stubs from protos/ into kvrelay/proto/ (the proto path is the import path).

`--check` writes nothing and exits with 1 if the committed stubs differ from what the protos give.
"""

import filecmp
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
PACKAGE = Path("kvrelay/proto/v1")


def generate(out: Path) -> None:
    """Write all stubs and their types below `out`."""
    files = sorted(str(p.relative_to(PROTOS)) for p in PROTOS.rglob("*.proto"))
    bin_dir = Path(sys.executable).parent
    subprocess.run(
        [
            sys.executable,
            "-m",
            "grpc_tools.protoc",
            f"-I{PROTOS}",
            f"--plugin=protoc-gen-mypy={bin_dir / 'protoc-gen-mypy'}",
            f"--plugin=protoc-gen-mypy_grpc={bin_dir / 'protoc-gen-mypy_grpc'}",
            f"--python_out={out}",
            f"--grpc_python_out={out}",
            f"--mypy_out=quiet:{out}",
            f"--mypy_grpc_out=quiet:{out}",
            *files,
        ],
        check=True,
    )


def main() -> int:
    """Entry point; returns the exit code."""
    with tempfile.TemporaryDirectory() as tmp:
        generate(Path(tmp))
        fresh = Path(tmp) / PACKAGE
        committed = ROOT / PACKAGE
        names = sorted(p.name for p in fresh.iterdir())
        if "--check" in sys.argv:
            present = sorted(p.name for p in committed.iterdir() if "_pb2" in p.name)
            _, differ, missing = filecmp.cmpfiles(fresh, committed, names, shallow=False)
            stale = sorted(set(differ) | set(missing) | (set(present) - set(names)))
            for name in stale:
                print(f"stale stub: {PACKAGE / name} (run `make protos`)")
            return 1 if stale else 0
        for old in committed.glob("*_pb2*"):
            old.unlink()
        for name in names:
            shutil.copy(fresh / name, committed / name)
        print(f"{len(names)} files written to {PACKAGE}")
        return 0


if __name__ == "__main__":
    sys.exit(main())
