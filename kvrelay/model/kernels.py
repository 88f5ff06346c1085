"""Compiled CPU kernels of one decoder layer, around its matrix products. Knows plain arrays; only `native` imports it.

Each entry point is a C function void(int64 *) that runs on every thread of an OpenMP team: an argument block comes in,
addresses and sizes, and each thread takes its share. What a row gets depends on that row alone.
"""

import math
from typing import Any

import numpy as np
from numba import carray, cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

TEAM_SIZE, TEAM_RANK, TEAM_BARRIER = "kvrelay_team_size", "kvrelay_team_rank", "kvrelay_team_barrier"
"""Symbols that `native` points at the OpenMP library before anything here is compiled or loaded."""
CHUNK_TOKENS = 256
"""Context is read in such pieces, each by one thread; their results are merged in order."""

_size = types.ExternalFunction(TEAM_SIZE, types.int32())
_rank = types.ExternalFunction(TEAM_RANK, types.int32())
_barrier = types.ExternalFunction(TEAM_BARRIER, types.void())
_FAST = {"contract", "reassoc", "nsz", "arcp"}
_LOG2E, _LN2_HIGH, _LN2_LOW = np.float32(1.44269504), np.float32(0.693359375), np.float32(-2.12194440e-4)
_ROUNDER, _ONE, _LOWEST, _HIGHEST = np.float32(3 << 22), np.float32(1), np.float32(-87), np.float32(88)
_P0, _P1, _P2 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
_P3, _P4, _P5 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)


@intrinsic
def _address(typingctx: Any, address: Any) -> Any:
    """int64 -> void *."""
    return types.voidptr(address), lambda context, builder, signature, args: builder.inttoptr(
        args[0], cgutils.voidptr_t
    )


@intrinsic
def _float_of_bits(typingctx: Any, bits: Any) -> Any:
    """int32 -> the float32 of the same bits."""
    return types.float32(types.int32), lambda context, builder, signature, args: builder.bitcast(
        args[0], context.get_value_type(types.float32)
    )


@njit(fastmath={"contract"}, error_model="numpy")
def _exp32(x: Any) -> Any:
    """exp in float32 to about one unit in the last place, in a form that vectorizes (Cephes' polynomial)."""
    x = x if x > _LOWEST else _LOWEST
    x = x if x < _HIGHEST else _HIGHEST
    n = (x * _LOG2E + _ROUNDER) - _ROUNDER
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    p = ((((_P0 * r + _P1) * r + _P2) * r + _P3) * r + _P4) * r + _P5
    p = p * (r * r) + r + _ONE
    return p * _float_of_bits((np.int32(n) + np.int32(127)) << np.int32(23))


def _exp_of(x):  # type: ignore[no-untyped-def]
    """Of x's own type. Without annotations, as numba compares the parameters with those of what it stands for."""
    raise NotImplementedError


_exp: Any = _exp_of


@overload(_exp, jit_options={"fastmath": {"contract"}, "error_model": "numpy"})
def _exp_typed(x):  # type: ignore[no-untyped-def]
    if x == types.float32:
        return lambda x: _exp32(x)
    return lambda x: math.exp(x)


@njit(error_model="numpy")
def _share(count: int, size: int, rank: int) -> Any:
    """This thread's range of `count` rows."""
    return count * rank // size, count * (rank + 1) // size


@njit(fastmath=_FAST, error_model="numpy")
def _normalized(x: Any, weight: Any, eps: Any, out: Any) -> None:
    """One row's RMS norm."""
    total = eps - eps
    for i in range(x.shape[0]):
        total += x[i] * x[i]
    scale = x.dtype.type(1) / np.sqrt(total / x.dtype.type(x.shape[0]) + eps)
    for i in range(x.shape[0]):
        out[i] = x[i] * scale * weight[i]


@njit(fastmath=_FAST, error_model="numpy")
def _gated(gate: Any, up: Any, out: Any) -> None:
    """silu(gate) * up."""
    one = gate.dtype.type(1)
    for i in range(gate.shape[0]):
        out[i] = gate[i] / (one + _exp(-gate[i])) * up[i]


@njit(fastmath=_FAST, error_model="numpy")
def _rotate(low: Any, high: Any, cos: Any, sin: Any) -> None:
    """The halves of one head, in place; element i of one is the partner of element i of the other."""
    for i in range(low.shape[0]):
        a, b = low[i], high[i]
        low[i] = a * cos[i] - b * sin[i]
        high[i] = b * cos[i] + a * sin[i]


@njit(fastmath=_FAST, error_model="numpy")
def _place(row: Any, cos: Any, sin: Any, norm: Any, eps: Any, runs: Any, first_run: int, slot: int, heads: int) -> None:
    """One token's q, k, v [heads + 2 kv_heads, head_dim]: norms and turns q and k, copies k and v into the pool."""
    kv_heads = (row.shape[0] - heads) // 2
    half = row.shape[1] // 2
    for head in range(heads + kv_heads):
        if norm.shape[0]:
            _normalized(row[head], norm[head], eps, row[head])
        _rotate(row[head, :half], row[head, half:], cos, sin)
    for head in range(2 * kv_heads):
        runs[first_run + head, slot, :] = row[heads + head]


@njit(fastmath=_FAST, error_model="numpy")
def _scores(query: Any, keys: Any, count: int, scale: Any, out: Any) -> None:
    """out[t] = query . keys[t] * scale, t < count."""
    for t in range(count):
        total = scale - scale
        key = keys[t]
        for i in range(query.shape[0]):
            total += query[i] * key[i]
        out[t] = total * scale


@njit(fastmath=_FAST, error_model="numpy")
def _add_values(weights: Any, values: Any, count: int, out: Any) -> None:
    """out += weights[t] * values[t], t < count; four at a time."""
    t = 0
    while t + 4 <= count:
        a, b, c, d = weights[t], weights[t + 1], weights[t + 2], weights[t + 3]
        va, vb, vc, vd = values[t], values[t + 1], values[t + 2], values[t + 3]
        for i in range(out.shape[0]):
            out[i] += (a * va[i] + b * vb[i]) + (c * vc[i] + d * vd[i])
        t += 4
    while t < count:
        for i in range(out.shape[0]):
            out[i] += weights[t] * values[t, i]
        t += 1


@njit(fastmath=_FAST, error_model="numpy")
def _weigh(scores: Any, count: int) -> Any:
    """Scores -> exp(score - best), in place; best and sum."""
    best = scores[0]
    for t in range(count):
        best = scores[t] if scores[t] > best else best
    for t in range(count):
        scores[t] = _exp(scores[t] - best)
    total = best - best
    for t in range(count):
        total += scores[t]
    return best, total


@njit(fastmath=_FAST, error_model="numpy")
def _attend_piece(
    queries: Any,
    runs: Any,
    table: Any,
    first: int,
    end: int,
    key_run: int,
    stride: int,
    side: int,
    scale: Any,
    scores: Any,
    out: Any,
) -> None:
    """Query heads of one KV head over tokens first .. end: out[g] = weighted values, then best score, then sum."""
    group, head_dim = queries.shape
    block_tokens = runs.shape[1]
    for at in range(first, end, block_tokens):
        keys = runs[table[at // block_tokens] * stride + key_run]
        for g in range(group):
            _scores(queries[g], keys, min(block_tokens, end - at), scale, scores[g, at - first :])
    for g in range(group):
        out[g, head_dim], out[g, head_dim + 1] = _weigh(scores[g], end - first)
        out[g, :head_dim] = 0
    for at in range(first, end, block_tokens):
        values = runs[table[at // block_tokens] * stride + key_run + side]
        for g in range(group):
            _add_values(scores[g, at - first :], values, min(block_tokens, end - at), out[g, :head_dim])


@njit(fastmath=_FAST, error_model="numpy")
def _merge(pieces: Any, out: Any) -> None:
    """Pieces [n, head_dim + 2] of one query head -> out [head_dim]."""
    head_dim = out.shape[0]
    best = pieces[0, head_dim]
    for n in range(pieces.shape[0]):
        best = pieces[n, head_dim] if pieces[n, head_dim] > best else best
    total = best - best
    out[:] = 0
    for n in range(pieces.shape[0]):
        factor = _exp(pieces[n, head_dim] - best)
        total += factor * pieces[n, head_dim + 1]
        for i in range(head_dim):
            out[i] += factor * pieces[n, i]
    for i in range(head_dim):
        out[i] /= total


def entry_points(dtype: Any) -> dict[str, Any]:
    """The C functions for float32 or float64, by name. Compiles, or loads from numba's cache."""

    @cfunc(types.void(types.voidptr), cache=True, error_model="numpy")
    def add_norm(block: Any) -> None:
        """x += delta; out = RMS norm of x. [x, delta or 0, weight, eps, out, rows, width, team]"""
        a = carray(block, 8, np.int64)
        rows, width = a[5], a[6]
        size, rank = (1, 0) if a[7] == 1 else (np.int64(_size()), np.int64(_rank()))
        x, out = carray(_address(a[0]), (rows, width), dtype), carray(_address(a[4]), (rows, width), dtype)
        weight, eps = carray(_address(a[2]), width, dtype), carray(_address(a[3]), 1, dtype)
        first, end = _share(rows, size, rank)
        if a[1]:
            delta = carray(_address(a[1]), (rows, width), dtype)
            for row in range(first, end):
                for i in range(width):
                    x[row, i] += delta[row, i]
        for row in range(first, end):
            _normalized(x[row], weight, eps[0], out[row])

    @cfunc(types.void(types.voidptr), cache=True, error_model="numpy")
    def gate(block: Any) -> None:
        """out = silu(gate) * up. [gate and up, out, rows, inner, team]"""
        a = carray(block, 5, np.int64)
        rows, inner = a[2], a[3]
        size, rank = (1, 0) if a[4] == 1 else (np.int64(_size()), np.int64(_rank()))
        both = carray(_address(a[0]), (rows, 2 * inner), dtype)
        out = carray(_address(a[1]), (rows, inner), dtype)
        first, end = _share(rows, size, rank)
        for row in range(first, end):
            _gated(both[row, :inner], both[row, inner:], out[row])

    @cfunc(types.void(types.voidptr), cache=True, error_model="numpy")
    def attention(block: Any) -> None:
        """Rotates q and k, stores k and v; then attends for the listed rows. Arguments: native.ATTENTION, in order."""
        a = carray(block, 27, np.int64)
        rows, heads, kv_heads, head_dim, block_tokens = a[8], a[9], a[10], a[11], a[13]
        stride = a[14] * 2 * kv_heads
        layer_run = a[15] * 2 * kv_heads
        size, rank = (1, 0) if a[25] == 1 else (np.int64(_size()), np.int64(_rank()))
        qkv = carray(_address(a[0]), (rows, heads + 2 * kv_heads, head_dim), dtype)
        half = head_dim // 2
        cos, sin = carray(_address(a[1]), (rows, half), dtype), carray(_address(a[2]), (rows, half), dtype)
        blocks, slots = carray(_address(a[3]), rows, np.int64), carray(_address(a[4]), rows, np.int64)
        runs = carray(_address(a[5]), (a[12] * stride, block_tokens, head_dim), dtype)
        norm = carray(_address(a[6]), (heads + kv_heads if a[6] else 0, head_dim), dtype)
        eps_scale = carray(_address(a[7]), 2, dtype)
        first, end = _share(rows, size, rank)
        for row in range(first, end):
            at = blocks[row] * stride + layer_run
            _place(qkv[row], cos[row], sin[row], norm, eps_scale[0], runs, at, slots[row], heads)
        if a[17] == 0:
            return
        items, table = carray(_address(a[16]), (a[17], 4), np.int64), carray(_address(a[18]), a[19], np.int64)
        attended = carray(_address(a[20]), (a[21], 3), np.int64)
        group = heads // kv_heads
        scores = carray(_address(a[22]), (a[26], group, CHUNK_TOKENS), dtype)
        pieces = carray(_address(a[23]), (heads, a[17], head_dim + 2), dtype)
        out = carray(_address(a[24]), (rows, heads, head_dim), dtype)
        if size > 1:
            _barrier()
        for work in range(rank, a[17] * kv_heads, size):
            head = work % kv_heads
            row, start, stop, offset = items[work // kv_heads]
            _attend_piece(
                qkv[row, head * group : (head + 1) * group],
                runs,
                table[offset:],
                start,
                stop,
                layer_run + head,
                stride,
                kv_heads,
                eps_scale[1],
                scores[rank],
                pieces[head * group : (head + 1) * group, work // kv_heads],
            )
        if size > 1:
            _barrier()
        for work in range(rank, a[21] * heads, size):
            row, first, end = attended[work // heads]
            _merge(pieces[work % heads, first:end], out[row, work % heads])

    return {"add_norm": add_norm, "gate": gate, "attention": attention}
