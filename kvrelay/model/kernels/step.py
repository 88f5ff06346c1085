"""A whole forward pass of few rows: layers and head, each thread its share. Knows the order of the work, and who waits.

Each thread computes its own columns of every product; it waits for the others wherever it then reads theirs.
"""

from typing import Any

import numpy as np
from numba import carray, njit

from kvrelay.model.kernels import block
from kvrelay.model.kernels.rows import gated, normalized
from kvrelay.model.kernels.team import FAST, STRICT, call_1, call_11, pointer, share_of_outputs, wait


@njit(**STRICT)
def attention_half(dtype: Any, a: Any, at: Any, layer: int, size: int, rank: int) -> None:
    """x += what attention adds. a, at: the step's and the layer's part of `block`."""
    rows, heads, width = a[block.ROWS], a[block.HEADS] * a[block.HEAD_DIM], a[block.HIDDEN]
    outputs = heads + 2 * a[block.KV_HEADS] * a[block.HEAD_DIM]
    first, end = share_of_outputs(outputs, size, rank)
    normed, qkv, item = _normed(dtype, a, at[block.ATTENTION_NORM], rank), a[block.QKV], a[block.ITEM]
    weights = at[block.QKV_WEIGHTS]
    scales, biases = at[block.QKV_SCALES], at[block.QKV_BIASES]
    call_11(
        a[block.PRODUCT_CODE],
        (normed, width * item, rows, weights, width, first, end, qkv, outputs * item, scales, biases),
    )
    a[block.LAYER], a[block.HEAD_NORMS] = layer, at[block.QK_NORMS]  # every thread writes the same
    wait(a[block.BARRIER], size)
    call_1(a[block.ATTENTION_CODE], a[block.SELF])
    wait(a[block.BARRIER], size)
    _add_product(
        dtype, a, a[block.ATTENTION], heads * item, at[block.OUT_WEIGHTS], heads, at[block.OUT_SCALES], size, rank
    )


@njit(**STRICT)
def feed_forward_half(dtype: Any, a: Any, at: Any, size: int, rank: int) -> None:
    """x += what the feed-forward adds."""
    rows, width, inner, item = a[block.ROWS], a[block.HIDDEN], a[block.INNER], a[block.ITEM]
    first, end = share_of_outputs(inner, size, rank)
    normed, both, step = _normed(dtype, a, at[block.MLP_NORM], rank), a[block.GATE_UP], 2 * inner * item
    weights = at[block.GATE_UP_WEIGHTS]
    for begin in (0, inner):
        low, high = begin + first, begin + end
        call_11(
            a[block.PRODUCT_CODE],
            (normed, width * item, rows, weights, width, low, high, both, step, at[block.GATE_UP_SCALES], 0),
        )
    gates = carray(pointer(both), (rows, 2 * inner), dtype)
    for row in range(rows):
        gated(gates[row, first:end], gates[row, inner + first : inner + end], gates[row, first:end])
    wait(a[block.BARRIER], size)
    _add_product(dtype, a, both, step, at[block.DOWN_WEIGHTS], inner, at[block.DOWN_SCALES], size, rank)


@njit(**STRICT)
def head(dtype: Any, a: Any, size: int, rank: int) -> None:
    """Logits of the wanted rows."""
    rows, width, wanted, vocab = a[block.ROWS], a[block.HIDDEN], a[block.WANTED_COUNT], a[block.VOCAB]
    x, chosen = carray(pointer(a[block.X]), (rows, width), dtype), carray(pointer(a[block.WANTED]), wanted, np.int64)
    at, item, logits = _scratch(a, rank), a[block.ITEM], a[block.LOGITS]
    normed = carray(pointer(at), (wanted, width), dtype)
    weight, eps = carray(pointer(a[block.LAST_NORM]), width, dtype), carray(pointer(a[block.CONSTANTS]), 2, dtype)[0]
    for n in range(wanted):
        normalized(x[chosen[n]], weight, eps, normed[n])
    first, end = share_of_outputs(vocab, size, rank)
    weights, scales = a[block.HEAD], a[block.HEAD_SCALES]
    call_11(
        a[block.PRODUCT_CODE],
        (at, width * item, wanted, weights, width, first, end, logits, vocab * item, scales, 0),
    )


@njit(**STRICT)
def _scratch(a: Any, rank: int) -> Any:
    """Address of this thread's rows."""
    return a[block.NORMED] + rank * max(a[block.ROWS], a[block.WANTED_COUNT]) * a[block.HIDDEN] * a[block.ITEM]


@njit(**STRICT)
def _normed(dtype: Any, a: Any, norm: int, rank: int) -> Any:
    """Address of this thread's own copy of the normed rows: cheaper than to wait for another's."""
    rows, width, at = a[block.ROWS], a[block.HIDDEN], _scratch(a, rank)
    x, out = carray(pointer(a[block.X]), (rows, width), dtype), carray(pointer(at), (rows, width), dtype)
    weight, eps = carray(pointer(norm), width, dtype), carray(pointer(a[block.CONSTANTS]), 2, dtype)[0]
    for row in range(rows):
        normalized(x[row], weight, eps, out[row])
    return at


@njit(**FAST)
def _add_product(
    dtype: Any, a: Any, y: int, y_step: int, w: int, inputs: int, scales: int, size: int, rank: int
) -> None:
    """x += y . w, each thread its own columns."""
    rows, width, result = a[block.ROWS], a[block.HIDDEN], a[block.DELTA]
    x, delta = carray(pointer(a[block.X]), (rows, width), dtype), carray(pointer(result), (rows, width), dtype)
    first, end = share_of_outputs(width, size, rank)
    call_11(
        a[block.PRODUCT_CODE],
        (y, y_step, rows, w, inputs, first, end, result, width * a[block.ITEM], scales, 0),
    )
    for row in range(rows):
        for i in range(first, end):
            x[row, i] += delta[row, i]
    wait(a[block.BARRIER], size)
