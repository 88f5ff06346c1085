"""The kernels' C entry points. Only `native` imports it.

All but `product` and `piece` are void(int64 *): they run on every thread of a team, each takes its share. Those two are
called by the others, at an address, so that they are compiled once.
"""

from typing import Any

import numpy as np
from numba import carray, cfunc, types

from kvrelay.model.kernels import block
from kvrelay.model.kernels import step as whole
from kvrelay.model.kernels.attention import attend_rows, piece, store_rows
from kvrelay.model.kernels.product import product
from kvrelay.model.kernels.rows import gated, normalized
from kvrelay.model.kernels.team import pointer, share, team_rank, team_size, wait

_EIGHT, _ELEVEN = (types.void(*[types.int64] * arguments) for arguments in (8, 11))


def between_products(dtype: Any) -> dict[str, Any]:
    """For float32 or float64, by name. Compiles, or loads from numba's cache."""

    @cfunc(types.void(types.voidptr), cache=True, error_model="numpy")
    def add_norm(address: Any) -> None:
        """x += delta; out = RMS norm of x. [x, delta or 0, weight, eps, out, rows, width, team]"""
        a = carray(address, 8, np.int64)
        rows, width = a[5], a[6]
        size, rank = (1, 0) if a[7] == 1 else (np.int64(team_size()), np.int64(team_rank()))
        x, out = carray(pointer(a[0]), (rows, width), dtype), carray(pointer(a[4]), (rows, width), dtype)
        weight, eps = carray(pointer(a[2]), width, dtype), carray(pointer(a[3]), 1, dtype)
        first, end = share(rows, size, rank)
        if a[1]:
            delta = carray(pointer(a[1]), (rows, width), dtype)
            for row in range(first, end):
                for i in range(width):
                    x[row, i] += delta[row, i]
        for row in range(first, end):
            normalized(x[row], weight, eps[0], out[row])

    @cfunc(types.void(types.voidptr), cache=True, error_model="numpy")
    def gate(address: Any) -> None:
        """out = silu(gate) * up. [gate and up, out, rows, inner, team]"""
        a = carray(address, 5, np.int64)
        rows, inner = a[2], a[3]
        size, rank = (1, 0) if a[4] == 1 else (np.int64(team_size()), np.int64(team_rank()))
        both = carray(pointer(a[0]), (rows, 2 * inner), dtype)
        out = carray(pointer(a[1]), (rows, inner), dtype)
        first, end = share(rows, size, rank)
        for row in range(first, end):
            gated(both[row, :inner], both[row, inner:], out[row])

    @cfunc(types.void(types.voidptr), cache=True, error_model="numpy")
    def attention(address: Any) -> None:
        """Rotates q and k, stores k and v; then attends for the listed rows. [block, up to ATTENTION_LENGTH]"""
        a = carray(address, block.ATTENTION_LENGTH, np.int64)
        size, rank = (1, 0) if a[block.TEAM] == 1 else (np.int64(team_size()), np.int64(team_rank()))
        store_rows(dtype, a, size, rank)
        if a[block.PIECE_COUNT]:
            wait(a[block.BARRIER], size)
            attend_rows(dtype, a, size, rank)

    @cfunc(_EIGHT, cache=True, error_model="numpy")
    def attend(at: int, query: int, blocks: int, first: int, end: int, run: int, scores: int, out: int) -> None:
        piece(dtype, at, query, blocks, first, end, run, scores, out)

    return {"add_norm": add_norm, "gate": gate, "attention": attention, "piece": attend}


def few_rows(dtype: Any, kind: Any) -> dict[str, Any]:
    """For float32 or float64 with weights of the same kind, or int8; as between_products()."""
    size, weight_size = np.dtype(dtype).itemsize, np.dtype(kind).itemsize

    @cfunc(_ELEVEN, cache=True, error_model="numpy")
    def multiply(
        x: int,
        x_step: int,
        rows: int,
        w: int,
        inputs: int,
        first: int,
        end: int,
        out: int,
        out_step: int,
        scales: int,
        biases: int,
    ) -> None:
        product(dtype, kind, x, x_step, rows, w, inputs, first, end, out, out_step, scales, biases, size, weight_size)

    @cfunc(types.void(types.voidptr), cache=True, error_model="numpy")
    def step(address: Any) -> None:
        """All layers and the head. [block, up to STEP_LENGTH]"""
        a = carray(address, block.STEP_LENGTH, np.int64)
        size, rank = (1, 0) if a[block.TEAM] == 1 else (np.int64(team_size()), np.int64(team_rank()))
        layers = carray(pointer(a[block.WEIGHTS]), (a[block.LAYERS], block.LAYER_LENGTH), np.int64)
        for layer in range(a[block.LAYERS]):
            whole.attention_half(dtype, a, layers[layer], layer, size, rank)
            whole.feed_forward_half(dtype, a, layers[layer], size, rank)
        whole.head(dtype, a, size, rank)

    return {"product": multiply, "step": step}
