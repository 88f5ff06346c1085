"""The kernels' C entry points. Only `native` imports it.

All but `product` and `piece` are void(int64 *): they run on every thread of a team, each takes its share. Those two are
called by the others, at an address, so that they are compiled once.
"""

from typing import Any

import numpy as np
from numba import carray, cfunc, types

from kvrelay.model.kernels import block, many
from kvrelay.model.kernels import step as whole
from kvrelay.model.kernels.attention import attend_rows, piece, store_rows
from kvrelay.model.kernels.chunk import attend as panels_attend
from kvrelay.model.kernels.panels import product as panels_product
from kvrelay.model.kernels.product import product
from kvrelay.model.kernels.team import pointer, team_rank, team_size, wait
from kvrelay.model.kernels.tiled import tiled_product
from kvrelay.model.kernels.tiled_attention import tiled_attend

_EIGHT, _ELEVEN = (types.void(*[types.int64] * arguments) for arguments in (8, 11))


def attending(dtype: Any) -> dict[str, Any]:
    """For float32 or float64, by name. Compiles, or loads from numba's cache."""

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

    return {"attention": attention, "piece": attend}


def few_rows(dtype: Any, kind: Any) -> dict[str, Any]:
    """For float32 or float64 with weights of the same kind, or int8; as attending()."""
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


def many_rows(dtype: Any, kind: Any, tiled: bool) -> dict[str, Any]:
    """As few_rows(). tiled: products in AMX tiles."""

    @cfunc(_ELEVEN, cache=True, error_model="numpy")
    def multiply(
        w: int,
        inputs: int,
        outputs: int,
        scales: int,
        biases: int,
        x: int,
        out: int,
        step: int,
        count: int,
        mode: int,
        scratch: int,
    ) -> None:
        if tiled:
            tiled_product(dtype, kind, w, inputs, outputs, scales, biases, x, out, step, count, mode, scratch)
        else:
            panels_product(dtype, kind, w, inputs, outputs, scales, biases, x, out, step, count, mode, scratch)

    @cfunc(_ELEVEN, cache=True, error_model="numpy")
    def attend(
        arguments: int,
        layer: int,
        head: int,
        row: int,
        end: int,
        seen: int,
        table: int,
        first: int,
        last: int,
        size: int,
        scratch: int,
    ) -> None:
        if tiled:
            tiled_attend(dtype, arguments, layer, head, row, end, seen, table, first, last, size, scratch)
        else:
            panels_attend(dtype, arguments, layer, head, row, end, seen, table, first, last, size, scratch)

    @cfunc(types.void(types.voidptr), cache=True, error_model="numpy")
    def step(address: Any) -> None:
        """All layers. [block, up to PANELS_LENGTH]"""
        a = carray(address, block.PANELS_LENGTH, np.int64)
        size, rank = (1, 0) if a[block.TEAM] == 1 else (np.int64(team_size()), np.int64(team_rank()))
        layers = carray(pointer(a[block.WEIGHTS]), (a[block.LAYERS], block.LAYER_LENGTH), np.int64)
        for layer in range(a[block.LAYERS]):
            many.attention_half(dtype, a, layers[layer], layer, size, rank)
            many.feed_forward_half(dtype, a, layers[layer], layer, size, rank)

    return {"product": multiply, "attend": attend, "step": step}
