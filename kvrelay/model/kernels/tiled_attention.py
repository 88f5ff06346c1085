"""Attention of a long run of rows in AMX tiles: same results and arguments as `chunk.attend`.

Scores and sums are products in tiles; what lies between, a softmax, takes panels as there.
"""

from typing import Any

import numpy as np
from numba import carray, njit

from kvrelay.model.kernels import block
from kvrelay.model.kernels.amx import STEP_BYTES, configure, release, split_inputs, split_rows, transpose
from kvrelay.model.kernels.block import PANEL_BYTES, PARTS_BYTES, STATE_ROWS, TILE_TOKENS, TILED
from kvrelay.model.kernels.chunk import finish, gather
from kvrelay.model.kernels.lanes import compare
from kvrelay.model.kernels.panels import size_of
from kvrelay.model.kernels.team import STRICT, pointer
from kvrelay.model.kernels.tiled_softmax import PAIRS_BESIDE, multiply_weighing, weigh_pairs

_TILES = STEP_BYTES // 1024
_ROWS = 16


@njit(**STRICT)
def tiled_attend(
    dtype: Any,
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
    """head_dim: a multiple of TILED."""
    a = carray(pointer(arguments), block.PANELS_LENGTH, np.int64)
    item, head_dim, heads, kv_heads = size_of(dtype), a[block.HEAD_DIM], a[block.HEADS], a[block.KV_HEADS]
    lanes, group, scale = PANEL_BYTES // item, heads // kv_heads, a[block.CONSTANTS] + item
    copied, side = scratch, TILE_TOKENS * head_dim * item
    keys, parts = copied + 2 * side, TILE_TOKENS * head_dim * PARTS_BYTES // TILED
    values, scores, score_step = keys + parts, keys + 2 * parts, TILE_TOKENS * PANEL_BYTES
    weights, weight_step = scores + 2 * score_step, TILE_TOKENS * PARTS_BYTES
    queries, query_step = weights + 2 * weight_step, head_dim * PARTS_BYTES
    panels = (last - first) // size + 1
    items = panels * group  # (panel, query head) pairs
    states, state_step = queries + items * query_step, (head_dim + STATE_ROWS) * PANEL_BYTES
    configure(dtype, dtype)
    for n in range(panels):
        panel = first + n * size
        query = a[block.PANEL_QKV] + (panel * (heads + 2 * kv_heads) + head * group) * head_dim * PANEL_BYTES
        split_inputs(dtype, dtype, query, PANEL_BYTES, group * head_dim // TILED, queries + n * group * query_step)
    for start in range(0, _visible(row, end, seen, last, lanes), TILE_TOKENS):
        fresh = 0 if start else 1
        count, begin = min(TILE_TOKENS, _visible(row, end, seen, last, lanes) - start), 0
        gather(dtype, a, layer, head, table, start, count, copied, side)
        _split(dtype, copied, side, head_dim, count, keys, values)
        while _visible(row, end, seen, first + begin // group * size, lanes) <= start:
            begin += group
        for k in range(begin, items + 2):
            # Scores of k; meanwhile weights of the one before, and sums of the one before that.
            weighed, summed, done, pairs = min(max(k - 1, begin), items - 1), k - 2, 0, 0
            panel, state = first + weighed // group * size, states + weighed * state_step
            found, to = scores + weighed % 2 * score_step, weights + weighed % 2 * weight_step
            hidden = start + 1 - (seen + panel * lanes - row)
            if begin < k <= items:
                pairs = _steps(_visible(row, end, seen, panel, lanes) - start) * _ROWS
                compare(dtype, dtype, found, 2 * pairs, hidden, scale, state, head_dim, fresh)
            if k < items:
                for s in range(_steps(_visible(row, end, seen, first + k // group * size, lanes) - start)):
                    multiply_weighing(
                        *(dtype, dtype, keys + s * query_step, queries + k * query_step, head_dim // TILED),
                        *(scores + k % 2 * score_step + s * TILED * PANEL_BYTES, 1),
                        *(found, hidden, scale, state, head_dim, to, done, pairs),
                    )
                    done += PAIRS_BESIDE * head_dim // TILED
            if summed >= begin:
                steps = _steps(_visible(row, end, seen, first + summed // group * size, lanes) - start)
                for i in range(0, head_dim, TILED):
                    multiply_weighing(
                        *(dtype, dtype, values + i // TILED * weight_step, weights + summed % 2 * weight_step, steps),
                        *(states + summed * state_step + i * PANEL_BYTES, fresh),
                        *(found, hidden, scale, state, head_dim, to, done, pairs),
                    )
                    done += PAIRS_BESIDE * steps
            weigh_pairs(dtype, dtype, found, hidden, scale, state, head_dim, to, done, pairs)
    release(dtype, dtype)
    for n in range(panels):
        panel = first + n * size
        here, stop = max(row - panel * lanes, 0), min(end - panel * lanes, lanes)
        out = a[block.PANEL_ATTENTION] + (panel * heads + head * group) * head_dim * PANEL_BYTES
        for g in range(group):
            finish(dtype, states + (n * group + g) * state_step, head_dim, here, stop, out + g * head_dim * PANEL_BYTES)


@njit(**STRICT)
def _visible(row: int, end: int, seen: int, panel: int, lanes: int) -> Any:
    """Tokens that the last of these rows in a panel sees."""
    return seen + min(end, (panel + 1) * lanes) - row - 1


@njit(**STRICT)
def _steps(count: int) -> Any:
    """Of a tile of which `count` tokens are seen."""
    return (min(count, TILE_TOKENS) + TILED - 1) // TILED


@njit(**STRICT)
def _split(dtype: Any, copied: int, side: int, head_dim: int, count: int, keys: int, values: int) -> None:
    """Parts of `count` tokens' keys, in blocks of TILED tokens, and of values, in blocks of TILED dimensions."""
    row = head_dim * size_of(dtype)
    steps = (count + TILED - 1) // TILED
    for which in range(2):
        _clear(dtype, copied + which * side + count * row, (steps * TILED - count) * head_dim)
    for s in range(steps):
        tokens, to = copied + s * TILED * row, keys + s * head_dim * PARTS_BYTES
        split_rows(dtype, dtype, tokens, tokens + _ROWS * row, row, head_dim // TILED, 0, 0, to)
    for i in range(0, head_dim, TILED):
        to = values + i * TILE_TOKENS // TILED * PARTS_BYTES
        split_inputs(dtype, dtype, copied + side + i * size_of(dtype), row, steps, to)
        transpose(dtype, dtype, to, steps * _TILES)


@njit(**STRICT)
def _clear(dtype: Any, at: int, count: int) -> None:
    values = carray(pointer(at), count, dtype)
    for i in range(count):
        values[i] = 0
