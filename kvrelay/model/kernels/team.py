"""What a kernel knows of where it runs: addresses, its thread's number and share. Knows no arithmetic.

Each entry point is a C function void(int64 *) that runs on every thread of an OpenMP team: an argument block comes in,
addresses and sizes, and each thread takes its share.
"""

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

TEAM_SIZE, TEAM_RANK = "kvrelay_team_size", "kvrelay_team_rank"
"""Symbols that `native` points at the OpenMP library before anything here is compiled or loaded."""
STRICT: dict[str, Any] = {"error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
FAST: dict[str, Any] = {**STRICT, "fastmath": {"contract", "reassoc", "nsz", "arcp"}}
"""Options of inner functions: whether sums may be reordered. Nobody calls them from Python."""

team_size = types.ExternalFunction(TEAM_SIZE, types.int32())
team_rank = types.ExternalFunction(TEAM_RANK, types.int32())

BARRIER_BYTES = 128
_GENERATION = 64  # a cache line of its own
_SPINS = 4096
"""Some 10 us; who waits longer lets others have its core, as one of them may be the thread it waits for."""

_yield = types.ExternalFunction("sched_yield", types.int32())


@intrinsic
def pointer(typingctx: Any, address: Any) -> Any:
    """int64 -> void *."""
    return types.voidptr(address), lambda context, builder, signature, args: builder.inttoptr(
        args[0], cgutils.voidptr_t
    )


@intrinsic
def _arrive(typingctx: Any, address: Any) -> Any:
    """Adds 1 at an address; what was there."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _pointer(builder, args[0]), ir.IntType(64)(1), "acq_rel")

    return types.int64(address), generate


@intrinsic
def _read(typingctx: Any, address: Any) -> Any:
    """What is at an address, and all that was written before it."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_pointer(builder, args[0]), "acquire", 8)

    return types.int64(address), generate


@intrinsic
def _write(typingctx: Any, address: Any, value: Any) -> Any:
    """For _read()."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[1], _pointer(builder, args[0]), "release", 8)
        return context.get_dummy_value()

    return types.void(address, types.int64), generate


def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, ir.IntType(64).as_pointer())


@njit(**STRICT)
def wait(barrier: int, size: int) -> None:
    """Until all threads are here. barrier: address of BARRIER_BYTES, zeros at first.

    libgomp's own barrier spins for long, and a thread without a core of its own may pay for that at every barrier.
    """
    if size == 1:
        return
    before = _read(barrier + _GENERATION)
    if _arrive(barrier) == size - 1:
        _write(barrier, 0)
        _write(barrier + _GENERATION, before + 1)
        return
    spins = 0
    while _read(barrier + _GENERATION) == before:
        spins += 1
        if spins > _SPINS:
            _yield()


def _call(arguments: int) -> Any:
    """Calls the C function void(int64, ...) at an address: what many use is compiled once that way."""
    kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * arguments)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values = args[1:] if arguments == 1 else cgutils.unpack_tuple(builder, args[1], arguments)
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), values)
        return context.get_dummy_value()

    @intrinsic
    def call(typingctx: Any, code: Any, values: Any) -> Any:
        return types.void(code, values), generate

    return call


call_1, call_8, call_11 = (_call(arguments) for arguments in (1, 8, 11))


@njit(**STRICT)
def share(count: int, size: int, rank: int) -> Any:
    """This thread's range of `count` items."""
    return count * rank // size, count * (rank + 1) // size


@njit(**STRICT)
def share_of_outputs(count: int, size: int, rank: int) -> Any:
    """As share(), cut at multiples of 4 where possible."""
    return count // 4 * rank // size * 4, count if rank == size - 1 else count // 4 * (rank + 1) // size * 4
