"""Where compiled kernels run: on torch's own OpenMP threads. Knows numba's settings and libgomp's symbols, no model.

`kernels` is imported here and nowhere else, once both are set up. numba's own thread pools are not used: they would
fight with torch's for the same cores.
"""

import ctypes
import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvrelay.cache_folder import cache_folder, exclusive, temporary_folder
from kvrelay.fallbacks import fall_back

log = logging.getLogger(__name__)


class Team:
    """Calls a kernel on each of torch's threads; with one thread, right here."""

    def __init__(self) -> None:
        library = _openmp()
        self._parallel = None if library is None else library.GOMP_parallel
        if self._parallel is not None:
            self._parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]

    @property
    def size(self) -> int:
        """Threads that a call uses."""
        return 1 if self._parallel is None else torch.get_num_threads()

    def run(self, kernel: "Kernel", arguments: "Arguments", threads: int) -> None:
        """Returns when all threads have returned. The GIL is released meanwhile."""
        if threads == 1 or self._parallel is None:
            kernel.call(arguments.address)
        else:
            self._parallel(kernel.address, arguments.address, threads, 0)


class Kernel:
    """One compiled C function."""

    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled  # keeps the code alive
        self.address: int = compiled.address
        self.call = compiled.ctypes


class Arguments:
    """A kernel's argument block: addresses and sizes, int64 each."""

    def __init__(self, values: Sequence[int]) -> None:
        self.values = np.array(values, np.int64)
        self.address: int = self.values.ctypes.data


@cache
def kernels(dtype: torch.dtype, cache_dir: str = "") -> dict[str, Kernel]:
    """Attention of few rows, in float32 or float64.

    Compiles for some seconds the first time on a machine.
    """
    return _compiled(cache_dir, lambda entry: entry.attending(_NUMPY[dtype]))


@cache
def few_kernels(dtype: torch.dtype, weights: torch.dtype, cache_dir: str = "") -> dict[str, Kernel]:
    """What makes a step of few rows, with weights of the same type or int8. Compiles as kernels()."""
    return _compiled(cache_dir, lambda entry: entry.few_rows(_NUMPY[dtype], _NUMPY[weights]))


@cache
def many_kernels(
    dtype: torch.dtype, weights: torch.dtype, cache_dir: str = "", *, tiled: bool = False
) -> dict[str, Kernel]:
    """What makes a step of more rows, tiled: in AMX tiles, see tiles(); as few_kernels()."""
    return _compiled(cache_dir, lambda entry: entry.many_rows(_NUMPY[dtype], _NUMPY[weights], tiled))


_NUMPY: dict[torch.dtype, type[np.number[Any]]] = {
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.int8: np.int8,
}


_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18
"""Of Linux on x86-64."""
WIDE_ROWS = 32
"""few_rows() where vectors are as wide as the kernels want them: there they take more rows too, in panels."""


def few_rows() -> int:
    """The most rows for which one compiled call is worth while here; 0: for none.

    The kernel's vectors are those of AVX-512, with which 32 was chosen; with shorter ones more than one row spills
    registers, and without a fused multiply-add each would be a call.
    """
    from llvmlite import binding

    if _openmp() is None and torch.get_num_threads() > 1:
        fall_back(log, "no_openmp", "torch's OpenMP is not found: steps of few rows are left to torch, on more threads")
        return 0
    has = binding.get_host_cpu_features()
    if has.get("avx512f"):
        return WIDE_ROWS
    rows = 4 if has.get("fma") or has.get("neon") else 0
    log.info("no AVX-512: the compiled step takes %d rows at most", rows)
    return rows


@cache
def tiles() -> bool:
    """Whether this process may use AMX tiles from now on: the system grants them for the asking, once and for all."""
    from llvmlite import binding

    has = binding.get_host_cpu_features()
    if not (has.get("amx-tile") and has.get("amx-bf16")):
        return False
    granted: int = ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA)
    if granted:
        fall_back(log, "amx_not_granted", "AMX tiles are not granted: long steps do without them")
    return not granted


def _compiled(cache_dir: str, make: Callable[[Any], dict[str, Any]]) -> dict[str, Kernel]:
    from llvmlite import binding

    library = _openmp()
    for symbol, name in (
        ("kvrelay_team_size", "omp_get_num_threads"),
        ("kvrelay_team_rank", "omp_get_thread_num"),
    ):
        # Without OpenMP the team has one thread, and these are never called.
        function: Any = ctypes.CDLL(None).abort if library is None else getattr(library, name)
        binding.add_symbol(symbol, ctypes.cast(function, ctypes.c_void_p).value)
    kept = cache_folder("kernels", cache_dir)
    try:
        found = _made(kept or temporary_folder("kernels"), make)
    except OSError as error:
        if kept is None:
            raise
        fall_back(log, "kernels_not_kept", "%s: compiled kernels are not kept there: %s", kept, error)
        found = _made(temporary_folder("kernels"), make)
    return {name: Kernel(compiled) for name, compiled in found.items()}


def _made(parent: Path, make: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    """Loads from a folder what is there, compiles what is not, and keeps it there. OSError: it cannot be kept."""
    import numba

    folder = parent / _version()
    folder.mkdir(exist_ok=True)
    numba.config.CACHE_DIR = str(folder)
    from kvrelay.model.kernels import entry

    with exclusive(parent):
        return make(entry)


def _version() -> str:
    """Of the kernels' sources: numba looks at the file of an entry point only, not at what it calls."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted((Path(__file__).parent / "kernels").glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


@cache
def _openmp() -> ctypes.CDLL | None:
    """torch's libgomp, which is loaded already; None where torch has another runtime."""
    torch_folder = Path(torch.__file__).parent
    shipped = [*torch_folder.glob("lib/libgomp*.so*"), *torch_folder.parent.glob("torch.libs/libgomp*.so*")]
    for name in (*map(str, sorted(shipped)), "libgomp.so.1"):
        try:
            library = ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
            _ = library.GOMP_parallel
        except (OSError, AttributeError):
            continue
        return library
    return None
