"""What is done to each row between matrix products: norms, the gate, rotation, storing KV. Knows plain arrays.

What a row gets depends on that row alone.
"""

import math
from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import intrinsic, overload

from kvrelay.model.kernels.team import FAST

_LOG2E, _LN2_HIGH, _LN2_LOW = np.float32(1.44269504), np.float32(0.693359375), np.float32(-2.12194440e-4)
_ROUNDER, _ONE, _LOWEST, _HIGHEST = np.float32(3 << 22), np.float32(1), np.float32(-87), np.float32(88)
_P0, _P1, _P2 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
_P3, _P4, _P5 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)


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


exp: Any = _exp_of


@overload(exp, jit_options={"fastmath": {"contract"}, "error_model": "numpy"})
def _exp_typed(x):  # type: ignore[no-untyped-def]
    if x == types.float32:
        return lambda x: _exp32(x)
    return lambda x: math.exp(x)


@njit(**FAST)
def normalized(x: Any, weight: Any, eps: Any, out: Any) -> None:
    """One row's RMS norm."""
    total = eps - eps
    for i in range(x.shape[0]):
        total += x[i] * x[i]
    scale = x.dtype.type(1) / np.sqrt(total / x.dtype.type(x.shape[0]) + eps)
    for i in range(x.shape[0]):
        out[i] = x[i] * scale * weight[i]


@njit(**FAST)
def gated(gate: Any, up: Any, out: Any) -> None:
    """silu(gate) * up."""
    one = gate.dtype.type(1)
    for i in range(gate.shape[0]):
        out[i] = gate[i] / (one + exp(-gate[i])) * up[i]


@njit(**FAST)
def rotate(low: Any, high: Any, cos: Any, sin: Any) -> None:
    """The halves of one head, in place; element i of one is the partner of element i of the other."""
    for i in range(low.shape[0]):
        a, b = low[i], high[i]
        low[i] = a * cos[i] - b * sin[i]
        high[i] = b * cos[i] + a * sin[i]


@njit(**FAST)
def place(row: Any, cos: Any, sin: Any, norm: Any, eps: Any, runs: Any, first_run: int, slot: int, heads: int) -> None:
    """One token's q, k, v [heads + 2 kv_heads, head_dim]: norms and turns q and k, copies k and v into the pool."""
    kv_heads = (row.shape[0] - heads) // 2
    half = row.shape[1] // 2
    for head in range(heads + kv_heads):
        if norm.shape[0]:
            normalized(row[head], norm[head], eps, row[head])
        rotate(row[head, :half], row[head, half:], cos, sin)
    for head in range(2 * kv_heads):
        for i in range(row.shape[1]):
            runs[first_run + head, slot, i] = row[heads + head, i]
