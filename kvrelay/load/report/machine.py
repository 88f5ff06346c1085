"""The machine that this runs on, in one line. Blocking: reads files of /proc where there are any."""

import os
import platform
from pathlib import Path


def machine(proc: Path = Path("/proc")) -> str:
    """ "2 cores of Intel(R) Xeon(R) Processor @ 2.90GHz, 7.8 GiB, Linux 6.1.0 x86_64, Python 3.11.2"."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    name = _said(proc / "cpuinfo", "model name")
    memory = _said(proc / "meminfo", "MemTotal").removesuffix(" kB")
    return ", ".join(
        [
            f"{usable} core{'' if usable == 1 else 's'}{f' of {name}' if name else ''}",
            *([f"{int(memory) / 2**20:.1f} GiB"] if memory.isdigit() else []),
            f"{platform.system()} {platform.release()} {platform.machine()}",
            f"Python {platform.python_version()}",
        ]
    )


def _said(path: Path, name: str) -> str:
    """The first value under a name in a file of "name : value" lines; empty if there is none."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")
