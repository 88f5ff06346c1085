"""Products of a few rows with a matrix that lies in memory as it was loaded. Knows no layer."""

from typing import Any

from numba import carray, njit

from kvrelay.model.kernels.team import STRICT, pointer
from kvrelay.model.kernels.vectors import dots_1_1, dots_1_4, dots_2_4, dots_3_4, dots_4_4, dots_4_4_half


@njit(**STRICT)
def product(
    dtype: Any,
    kind: Any,
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
    size: int,
    weight_size: int,
) -> None:
    """x [rows, inputs] . w [first .. end, inputs] * scales + biases -> out [rows, first .. end].

    Addresses, and steps of rows in bytes. scales, biases: of all outputs, or 0: there are none.
    """
    step = inputs * weight_size
    for o in range(first, end, 4):
        tile(
            dtype,
            kind,
            x,
            x_step,
            rows,
            w + o * step,
            step,
            min(4, end - o),
            inputs,
            out + o * size,
            out_step,
            size,
            w + (o + 4) * step,
        )
    if scales or biases:
        _finish(dtype, out, out_step, rows, first, end, scales, biases)


@njit(**STRICT)
def _finish(dtype: Any, out: int, out_step: int, rows: int, first: int, end: int, scales: int, biases: int) -> None:
    scale, bias = carray(pointer(scales), end, dtype), carray(pointer(biases), end, dtype)
    for row in range(rows):
        values = carray(pointer(out + row * out_step), end, dtype)
        for i in range(first, end):
            value = values[i]
            if scales:
                value *= scale[i]
            if biases:
                value += bias[i]
            values[i] = value


@njit(**STRICT)
def tile(
    dtype: Any,
    kind: Any,
    x: int,
    x_step: int,
    rows: int,
    w: int,
    w_step: int,
    outputs: int,
    count: int,
    out: int,
    out_step: int,
    size: int,
    ahead: int,
) -> None:
    """x [rows, count] . w [outputs <= 4, count] -> out [rows, outputs]; `ahead`: where the weights come from next."""
    if outputs < 4:
        for r in range(rows):
            for o in range(outputs):
                to = out + r * out_step + o * size
                dots_1_1(dtype, kind, x + r * x_step, x_step, w + o * w_step, w_step, count, to, out_step, ahead)
        return
    for r in range(0, rows, 4):
        to = out + r * out_step
        if rows >= r + 4:
            if rows == 4:
                dots_4_4(dtype, kind, x, x_step, w, w_step, count, to, out_step, ahead)
            else:
                # Two passes over these weights fetch half of the next ones each.
                part = ahead + (r // 4 % 2) * 2 * w_step
                dots_4_4_half(dtype, kind, x + r * x_step, x_step, w, w_step, count, to, out_step, part)
        elif rows == r + 3:
            dots_3_4(dtype, kind, x + r * x_step, x_step, w, w_step, count, to, out_step, ahead)
        elif rows == r + 2:
            dots_2_4(dtype, kind, x + r * x_step, x_step, w, w_step, count, to, out_step, ahead)
        else:
            dots_1_4(dtype, kind, x + r * x_step, x_step, w, w_step, count, to, out_step, ahead)
