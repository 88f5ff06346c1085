"""Attention of long runs of rows over the paged pool, a panel of rows at a time. Knows block tables, no layers.

A thread copies a tile of keys and values out of its blocks once for all its panels. Scores, weights and sums are in
panels too: each lane is one query. A lane's result depends on its own position alone: tiles are cut by position.
"""

from typing import Any

import numpy as np
from numba import carray, njit

from kvrelay.model.kernels import block
from kvrelay.model.kernels.block import PANEL_BYTES, STATE_ROWS, TILE_TOKENS
from kvrelay.model.kernels.lanes import compare, weigh
from kvrelay.model.kernels.panels import size_of, tile
from kvrelay.model.kernels.team import FAST, STRICT, call_11, pointer


@njit(**STRICT)
def attend_sequences(dtype: Any, a: Any, layer: int, size: int, begin: int, scratch: int) -> None:
    """All listed sequences' rows in panels begin, begin + size ... scratch: see `model.many`."""
    lanes, count = PANEL_BYTES // size_of(dtype), a[block.SEQUENCE_COUNT]
    sequences = carray(pointer(a[block.SEQUENCES]), (count, 4), np.int64)
    for s in range(count):
        row, end, seen, offset = sequences[s]
        first, last = row // lanes, (end - 1) // lanes
        first = max(first + (begin - first) % size, begin)
        if first <= last:
            last -= (last - first) % size
            for head in range(a[block.KV_HEADS]):
                table = a[block.LONG_TABLE] + offset * 8
                call_11(
                    a[block.ATTEND_CODE],
                    (a[block.SELF], layer, head, row, end, seen, table, first, last, size, scratch),
                )


@njit(**STRICT)
def attend(
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
    """Rows row .. end of one sequence in panels first, first + size .. last, and one KV head.

    seen: tokens that the first row sees; each row sees one more than the one before.
    """
    a = carray(pointer(arguments), block.PANELS_LENGTH, np.int64)
    item, head_dim, heads, kv_heads = size_of(dtype), a[block.HEAD_DIM], a[block.HEADS], a[block.KV_HEADS]
    lanes, group, scale = PANEL_BYTES // item, heads // kv_heads, a[block.CONSTANTS] + item
    keys, side = scratch, TILE_TOKENS * head_dim * item
    scores = keys + 2 * side
    states, state_step = scores + TILE_TOKENS * PANEL_BYTES, (head_dim + STATE_ROWS) * PANEL_BYTES
    most = seen + min(end, (last + 1) * lanes) - row - 1
    for start in range(0, most, TILE_TOKENS):
        fresh = 0 if start else 1
        gather(dtype, a, layer, head, table, start, min(TILE_TOKENS, most - start), keys, side)
        state = states
        for panel in range(first, last + 1, size):
            # Lane n of the panel sees seen_0 + n tokens.
            seen_0 = seen + panel * lanes - row
            count = min(TILE_TOKENS, seen + min(end, (panel + 1) * lanes) - row - 1 - start)
            query = a[block.PANEL_QKV] + (panel * (heads + 2 * kv_heads) + head * group) * head_dim * PANEL_BYTES
            for g in range(group if count > 0 else 0):
                to, at = state + g * state_step, query + g * head_dim * PANEL_BYTES
                tile(dtype, keys, head_dim * item, item, count, at, head_dim, scores, 1)
                compare(dtype, dtype, scores, count, start + 1 - seen_0, scale, to, head_dim, fresh)
                weigh(dtype, dtype, scores, count, start + 1 - seen_0, scale, to, head_dim)
                tile(dtype, keys + side, item, head_dim * item, head_dim, scores, count, to, fresh)
            state += group * state_step
    state = states
    for panel in range(first, last + 1, size):
        here, stop = max(row - panel * lanes, 0), min(end - panel * lanes, lanes)
        out = a[block.PANEL_ATTENTION] + (panel * heads + head * group) * head_dim * PANEL_BYTES
        for g in range(group):
            finish(dtype, state, head_dim, here, stop, out + g * head_dim * PANEL_BYTES)
            state += state_step


@njit(**STRICT)
def gather(dtype: Any, a: Any, layer: int, head: int, table: int, start: int, count: int, keys: int, side: int) -> None:
    """Copies keys and values of tokens start .. start + count."""
    kv_heads, head_dim, block_tokens = a[block.KV_HEADS], a[block.HEAD_DIM], a[block.BLOCK_TOKENS]
    run = block_tokens * head_dim * size_of(dtype)
    blocks = carray(pointer(table), (start + count - 1) // block_tokens + 1, np.int64)
    done = 0
    while done < count:
        slot = (start + done) % block_tokens
        some = min(block_tokens - slot, count - done)
        place = (blocks[(start + done) // block_tokens] * a[block.LAYERS] + layer) * 2 * kv_heads + head
        for which in range(2):
            source = a[block.POOL] + (place + which * kv_heads) * run + slot * head_dim * size_of(dtype)
            to = keys + which * side + done * head_dim * size_of(dtype)
            from_pool, copied = (
                carray(pointer(source), some * head_dim, dtype),
                carray(pointer(to), some * head_dim, dtype),
            )
            for i in range(some * head_dim):
                copied[i] = from_pool[i]
        done += some


@njit(**FAST)
def finish(dtype: Any, state: int, head_dim: int, first: int, end: int, out: int) -> None:
    """Lanes first .. end of out [head_dim, lanes] = sums / total."""
    lanes = PANEL_BYTES // size_of(dtype)
    sums, to = carray(pointer(state), (head_dim + 2, lanes), dtype), carray(pointer(out), (head_dim, lanes), dtype)
    for i in range(head_dim):
        for lane in range(first, end):
            to[i, lane] = sums[i, lane] / sums[head_dim + 1, lane]
