"""What a kernel knows of where it runs: addresses, its thread's number and share. Knows no arithmetic.

Each entry point is a C function void(int64 *) that runs on every thread of an OpenMP team: an argument block comes in,
addresses and sizes, and each thread takes its share.
"""

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

TEAM_SIZE, TEAM_RANK, TEAM_BARRIER = "kvrelay_team_size", "kvrelay_team_rank", "kvrelay_team_barrier"
"""Symbols that `native` points at the OpenMP library before anything here is compiled or loaded."""
STRICT: dict[str, Any] = {"error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
FAST: dict[str, Any] = {**STRICT, "fastmath": {"contract", "reassoc", "nsz", "arcp"}}
"""Options of inner functions: whether sums may be reordered. Nobody calls them from Python."""

team_size = types.ExternalFunction(TEAM_SIZE, types.int32())
team_rank = types.ExternalFunction(TEAM_RANK, types.int32())
team_barrier = types.ExternalFunction(TEAM_BARRIER, types.void())


@intrinsic
def pointer(typingctx: Any, address: Any) -> Any:
    """int64 -> void *."""
    return types.voidptr(address), lambda context, builder, signature, args: builder.inttoptr(
        args[0], cgutils.voidptr_t
    )


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
