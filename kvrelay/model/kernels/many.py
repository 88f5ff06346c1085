"""All layers for many rows, in panels, each thread its own ones. Knows the order of the work, and who waits.

A thread waits for the others once a layer, for the KV of their tokens; and for what it attends to with single rows.
"""

from typing import Any

import numpy as np
from numba import carray, njit

from kvrelay.model.kernels import block
from kvrelay.model.kernels.attention import attend_rows
from kvrelay.model.kernels.block import PANEL_BYTES
from kvrelay.model.kernels.chunk import attend_sequences
from kvrelay.model.kernels.lanes import norm
from kvrelay.model.kernels.panels import size_of
from kvrelay.model.kernels.rows import rotate
from kvrelay.model.kernels.team import FAST, STRICT, call_11, pointer, wait


@njit(**STRICT)
def attention_half(dtype: Any, a: Any, at: Any, layer: int, size: int, rank: int) -> None:
    """x += what attention adds. a, at: the step's and the layer's part of `block`."""
    width, q = a[block.HIDDEN], a[block.HEADS] * a[block.HEAD_DIM]
    outputs = q + 2 * a[block.KV_HEADS] * a[block.HEAD_DIM]
    mine, code, scratch = _mine(a, size, rank), a[block.PRODUCT_CODE], _scratch(a, rank)
    x, normed = _at(a[block.PANEL_X], width, rank), _at(a[block.PANEL_NORMED], width, rank)
    qkv = _at(a[block.PANEL_QKV], outputs, rank)
    _norm(dtype, a, at[block.ATTENTION_NORM], x, normed, mine, size)
    weights, scales, biases = at[block.QKV_WEIGHTS], at[block.QKV_SCALES], at[block.QKV_BIASES]
    call_11(code, (weights, width, outputs, scales, biases, normed, qkv, size, mine, block.FRESH, scratch))
    for n in range(mine):
        _turn(dtype, a, at[block.QK_NORMS], rank + n * size)
        _store(dtype, a, layer, rank + n * size)
    a[block.LAYER] = layer  # every thread writes the same
    if a[block.PIECE_COUNT]:
        _exchange(dtype, a, size, rank, 1)
    wait(a[block.BARRIER], size)
    first, mine = _wanted(a, layer, size, rank)
    attend_sequences(dtype, a, layer, size, first, scratch)
    if a[block.PIECE_COUNT]:
        attend_rows(dtype, a, size, rank)
        wait(a[block.BARRIER], size)
        _exchange(dtype, a, size, rank, 0)
    weights, scales = at[block.OUT_WEIGHTS], at[block.OUT_SCALES]
    x, attended = _at(a[block.PANEL_X], width, first), _at(a[block.PANEL_ATTENTION], q, first)
    call_11(code, (weights, q, width, scales, 0, attended, x, size, mine, block.ADDED, scratch))


@njit(**STRICT)
def feed_forward_half(dtype: Any, a: Any, at: Any, layer: int, size: int, rank: int) -> None:
    """x += what the feed-forward adds."""
    width, inner, (first, mine) = a[block.HIDDEN], a[block.INNER], _wanted(a, layer, size, rank)
    code, scratch = a[block.PRODUCT_CODE], _scratch(a, rank)
    x, normed = _at(a[block.PANEL_X], width, first), _at(a[block.PANEL_NORMED], width, first)
    gates = _at(a[block.PANEL_INNER], inner, first)
    _norm(dtype, a, at[block.MLP_NORM], x, normed, mine, size)
    weights, scales = at[block.GATE_UP_WEIGHTS], at[block.GATE_UP_SCALES]
    call_11(code, (weights, width, inner, scales, 0, normed, gates, size, mine, block.GATED, scratch))
    weights, scales = at[block.DOWN_WEIGHTS], at[block.DOWN_SCALES]
    call_11(code, (weights, inner, width, scales, 0, gates, x, size, mine, block.ADDED, scratch))


@njit(**STRICT)
def _mine(a: Any, size: int, rank: int) -> Any:
    """How many panels are this thread's: each size-th, from `rank` on."""
    return (a[block.PANELS] - rank + size - 1) // size


@njit(**STRICT)
def _wanted(a: Any, layer: int, size: int, rank: int) -> Any:
    """The first of this thread's panels that must get through a layer, and how many follow, it included.

    In the last layer, what is before the first wanted row is there for its KV alone.
    """
    unwanted = (a[block.FIRST_WANTED] - rank + size - 1) // size if layer == a[block.LAYERS] - 1 else 0
    unwanted = min(max(unwanted, 0), _mine(a, size, rank))
    return rank + unwanted * size, _mine(a, size, rank) - unwanted


@njit(**STRICT)
def _at(panels: int, features: int, panel: int) -> Any:
    """Address of a panel."""
    return panels + panel * features * PANEL_BYTES


@njit(**STRICT)
def _scratch(a: Any, rank: int) -> Any:
    return a[block.PRIVATE] + rank * a[block.PRIVATE_BYTES]


@njit(**STRICT)
def _norm(dtype: Any, a: Any, weights: int, x: int, out: int, mine: int, size: int) -> None:
    step = a[block.HIDDEN] * PANEL_BYTES * size
    for n in range(mine):
        norm(dtype, dtype, x + n * step, weights, a[block.CONSTANTS], out + n * step, a[block.HIDDEN])


@njit(**STRICT)
def _turn(dtype: Any, a: Any, norms: int, panel: int) -> None:
    """Norms and turns a panel's q and k."""
    heads, kv_heads, head_dim = a[block.HEADS], a[block.KV_HEADS], a[block.HEAD_DIM]
    half = head_dim // 2 * PANEL_BYTES
    count = half // size_of(dtype)
    cos = carray(pointer(a[block.PANEL_COS] + panel * half), count, dtype)
    sin = carray(pointer(a[block.PANEL_SIN] + panel * half), count, dtype)
    at = a[block.PANEL_QKV] + panel * (heads + 2 * kv_heads) * head_dim * PANEL_BYTES
    for head in range(heads + kv_heads):
        low = at + head * head_dim * PANEL_BYTES
        if norms:
            norm(dtype, dtype, low, norms + head * head_dim * size_of(dtype), a[block.CONSTANTS], low, head_dim)
        rotate(carray(pointer(low), count, dtype), carray(pointer(low + half), count, dtype), cos, sin)


@njit(**FAST)
def _store(dtype: Any, a: Any, layer: int, panel: int) -> None:
    """Copies a panel's k and v into the pool."""
    heads, kv_heads, head_dim, lanes = (
        a[block.HEADS],
        a[block.KV_HEADS],
        a[block.HEAD_DIM],
        PANEL_BYTES // size_of(dtype),
    )
    rows, block_tokens = a[block.ROWS], a[block.BLOCK_TOKENS]
    stride, first_run = a[block.LAYERS] * 2 * kv_heads, layer * 2 * kv_heads
    blocks, slots = carray(pointer(a[block.BLOCKS]), rows, np.int64), carray(pointer(a[block.SLOTS]), rows, np.int64)
    runs = carray(pointer(a[block.POOL]), (a[block.POOL_BLOCKS] * stride, block_tokens, head_dim), dtype)
    qkv = carray(pointer(a[block.PANEL_QKV]), (a[block.PANELS], heads + 2 * kv_heads, head_dim, lanes), dtype)
    first = panel * lanes
    for head in range(2 * kv_heads):
        for row in range(first, min(first + lanes, rows)):
            to = runs[blocks[row] * stride + first_run + head, slots[row]]
            for i in range(head_dim):
                to[i] = qkv[panel, heads + head, i, row - first]


@njit(**STRICT)
def _exchange(dtype: Any, a: Any, size: int, rank: int, out: int) -> None:
    """Copies q of single rows out of this thread's panels (out: 1), or what they attended to into them."""
    heads, head_dim, count, lanes = (
        a[block.HEADS],
        a[block.HEAD_DIM],
        a[block.ATTENDED_COUNT],
        PANEL_BYTES // size_of(dtype),
    )
    every, q = (heads + 2 * a[block.KV_HEADS]) * head_dim, heads * head_dim
    short = carray(pointer(a[block.SHORT_ROWS]), count, np.int64)
    queries = carray(pointer(a[block.QKV]), (count, every), dtype)
    results = carray(pointer(a[block.ATTENTION]), (count, q), dtype)
    qkv = carray(pointer(a[block.PANEL_QKV]), (a[block.PANELS], every, lanes), dtype)
    attended = carray(pointer(a[block.PANEL_ATTENTION]), (a[block.PANELS], q, lanes), dtype)
    for n in range(count):
        panel, lane = short[n] // lanes, short[n] % lanes
        if panel % size == rank:
            for i in range(q):
                if out:
                    queries[n, i] = qkv[panel, i, lane]
                else:
                    attended[panel, i, lane] = results[n, i]
