"""Attention of single rows over the paged pool, read in place. Knows block tables and pieces, no sequences.

A row's context is cut into pieces by position alone, each computed by one thread; they are merged in order.
"""

from typing import Any

import numpy as np
from numba import carray, njit

from kvrelay.model.kernels import block
from kvrelay.model.kernels.product import tile
from kvrelay.model.kernels.rows import exp, place
from kvrelay.model.kernels.team import FAST, STRICT, call_8, pointer, share, wait
from kvrelay.model.kernels.vectors import sums_1_4, sums_2_4, sums_3_4, sums_4_4

CHUNK_TOKENS = 256
"""Longest piece."""


@njit(**STRICT)
def store_rows(dtype: Any, a: Any, size: int, rank: int) -> None:
    """Norms and turns this thread's rows of q and k, and stores k and v. a: see `block`."""
    rows, heads, kv_heads, head_dim, block_tokens = (
        a[block.ROWS],
        a[block.HEADS],
        a[block.KV_HEADS],
        a[block.HEAD_DIM],
        a[block.BLOCK_TOKENS],
    )
    stride, first_run = a[block.LAYERS] * 2 * kv_heads, a[block.LAYER] * 2 * kv_heads
    qkv = carray(pointer(a[block.QKV]), (rows, heads + 2 * kv_heads, head_dim), dtype)
    half = head_dim // 2
    cos, sin = carray(pointer(a[block.COS]), (rows, half), dtype), carray(pointer(a[block.SIN]), (rows, half), dtype)
    blocks, slots = carray(pointer(a[block.BLOCKS]), rows, np.int64), carray(pointer(a[block.SLOTS]), rows, np.int64)
    runs = carray(pointer(a[block.POOL]), (a[block.POOL_BLOCKS] * stride, block_tokens, head_dim), dtype)
    norms = carray(pointer(a[block.HEAD_NORMS]), (heads + kv_heads if a[block.HEAD_NORMS] else 0, head_dim), dtype)
    eps = carray(pointer(a[block.CONSTANTS]), 2, dtype)[0]
    first, end = share(rows, size, rank)
    for row in range(first, end):
        place(qkv[row], cos[row], sin[row], norms, eps, runs, blocks[row] * stride + first_run, slots[row], heads)


@njit(**STRICT)
def attend_rows(dtype: Any, a: Any, size: int, rank: int) -> None:
    """This thread's pieces, then its part of merging them. a: see `block`."""
    heads, kv_heads, head_dim, item = a[block.HEADS], a[block.KV_HEADS], a[block.HEAD_DIM], a[block.ITEM]
    count, group = a[block.PIECE_COUNT], heads // kv_heads
    items = carray(pointer(a[block.PIECES]), (count, 4), np.int64)
    scores = a[block.SCORES] + rank * group * CHUNK_TOKENS * item
    length = (head_dim + 2) * item
    for work in range(rank, count * kv_heads, size):
        head = work % kv_heads
        row, start, stop, offset = items[work // kv_heads]
        query = a[block.QKV] + (row * (heads + 2 * kv_heads) + head * group) * head_dim * item
        out = a[block.MERGED] + (head * group * count + work // kv_heads) * length
        run, table = a[block.LAYER] * 2 * kv_heads + head, a[block.TABLE] + offset * 8
        call_8(a[block.PIECE_CODE], (a[block.SELF], query, table, start, stop, run, scores, out))
    wait(a[block.BARRIER], size)
    attended = carray(pointer(a[block.ATTENDED]), (a[block.ATTENDED_COUNT], 3), np.int64)
    pieces = carray(pointer(a[block.MERGED]), (heads, count, head_dim + 2), dtype)
    merged = carray(pointer(a[block.ATTENTION]), (a[block.ROWS], heads, head_dim), dtype)
    for work in range(rank, a[block.ATTENDED_COUNT] * heads, size):
        row, first, end = attended[work // heads]
        _merge(pieces[work % heads, first:end], merged[row, work % heads])


@njit(**STRICT)
def piece(
    dtype: Any, arguments: int, query: int, blocks: int, first: int, end: int, run: int, scores: int, out: int
) -> None:
    """Query heads of one KV head over tokens first .. end: out[g] = weighted values, then best score, then sum."""
    a = carray(pointer(arguments), block.ATTENTION_LENGTH, np.int64)
    item, scale = a[block.ITEM], carray(pointer(a[block.CONSTANTS]), 2, dtype)[1]
    kv_heads, head_dim, block_tokens = a[block.KV_HEADS], a[block.HEAD_DIM], a[block.BLOCK_TOKENS]
    group, stride = a[block.HEADS] // kv_heads, a[block.LAYERS] * 2 * kv_heads
    row, score_row, step = head_dim * item, CHUNK_TOKENS * item, (head_dim + 2) * a[block.PIECE_COUNT] * item
    keys, side = a[block.POOL] + run * block_tokens * row, kv_heads * block_tokens * row
    block_step = stride * block_tokens * row
    table = carray(pointer(blocks), -(-end // block_tokens), np.int64)
    for at in range(first, end, block_tokens):
        here, count = keys + table[at // block_tokens] * block_step, min(block_tokens, end - at)
        later = at + block_tokens
        then = keys + table[later // block_tokens] * block_step if later < end else here + side
        for t in range(0, count, 4):
            to = scores + (at - first + t) * item
            few = min(4, count - t)
            tile(
                dtype, dtype, query, row, group, here + t * row, row, few, head_dim, to, score_row, item, then + t * row
            )
    weights = carray(pointer(scores), (group, CHUNK_TOKENS), dtype)
    for g in range(group):
        head = carray(pointer(out + g * step), head_dim + 2, dtype)
        head[head_dim], head[head_dim + 1] = _weigh(weights[g], end - first, scale)
        for i in range(head_dim):
            head[i] = 0
    for at in range(first, end, block_tokens):
        here, count = keys + side + table[at // block_tokens] * block_step, min(block_tokens, end - at)
        later = at + block_tokens
        then = keys + side + table[later // block_tokens] * block_step if later < end else here
        _add_values(dtype, scores + (at - first) * item, group, here, count, head_dim, out, step, item, then)


@njit(**FAST)
def _weigh(scores: Any, count: int, scale: Any) -> Any:
    """Scores -> exp(scale * (score - best)), in place; scale * best, and the sum."""
    best = scores[0]
    for t in range(count):
        best = scores[t] if scores[t] > best else best
    for t in range(count):
        scores[t] = exp((scores[t] - best) * scale)
    total = best - best
    for t in range(count):
        total += scores[t]
    return best * scale, total


@njit(**STRICT)
def _add_values(
    dtype: Any,
    weights: int,
    group: int,
    values: int,
    count: int,
    head_dim: int,
    out: int,
    piece: int,
    item: int,
    ahead: int,
) -> None:
    """out [group, head_dim] += weights [group, count] . values [count, head_dim]."""
    row, score_row, lanes = head_dim * item, CHUNK_TOKENS * item, 64 // item
    for g in range(0, group, 4):
        some, rows = weights + g * score_row, min(4, group - g)
        i = 0
        while i + 4 * lanes <= head_dim:
            at, to, then = values + i * item, out + g * piece + i * item, ahead + i * item
            if rows == 1:
                sums_1_4(dtype, dtype, some, score_row, at, row, count, to, piece, then)
            elif rows == 2:
                sums_2_4(dtype, dtype, some, score_row, at, row, count, to, piece, then)
            elif rows == 3:
                sums_3_4(dtype, dtype, some, score_row, at, row, count, to, piece, then)
            else:
                sums_4_4(dtype, dtype, some, score_row, at, row, count, to, piece, then)
            i += 4 * lanes
        if i < head_dim:
            for r in range(g, g + rows):
                w, to = (
                    carray(pointer(weights + r * score_row), count, dtype),
                    carray(pointer(out + r * piece), head_dim, dtype),
                )
                rest = carray(pointer(values), (count, head_dim), dtype)
                for t in range(count):
                    for j in range(i, head_dim):
                        to[j] += w[t] * rest[t, j]


@njit(**FAST)
def _merge(pieces: Any, out: Any) -> None:
    """Pieces [n, head_dim + 2] of one query head -> out [head_dim]."""
    head_dim = out.shape[0]
    best = pieces[0, head_dim]
    for n in range(pieces.shape[0]):
        best = pieces[n, head_dim] if pieces[n, head_dim] > best else best
    total = best - best
    for i in range(head_dim):
        out[i] = 0
    for n in range(pieces.shape[0]):
        factor = exp(pieces[n, head_dim] - best)
        total += factor * pieces[n, head_dim + 1]
        for i in range(head_dim):
            out[i] += factor * pieces[n, i]
    for i in range(head_dim):
        out[i] /= total
