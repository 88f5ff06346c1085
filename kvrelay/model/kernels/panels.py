"""Work on panels: rows of PANEL_BYTES, each one feature of as many tokens as fit. Knows no layer and no sequence.

What a token gets depends on its own lane alone: a weight is multiplied with all lanes, in the order of the inputs.
"""

from typing import Any

from numba import carray, njit

from kvrelay.model.kernels.block import ADDED, BLOCK_OUTPUTS, GATED, PANEL_BYTES
from kvrelay.model.kernels.lanes import panel_1, panel_8, panel_block
from kvrelay.model.kernels.rows import gated
from kvrelay.model.kernels.team import FAST, STRICT, pointer, share

CHAIN = 384
"""Terms that are added to one sum, one after the other; then sums are added. More would lose more bits."""
PASS_BYTES = 1 << 20
"""Of the inputs that all weights are multiplied with before the next ones: half of a second cache."""


@njit(**STRICT)
def size_of(dtype: Any) -> Any:
    """Bytes of an element, known to the compiler."""
    return carray(pointer(0), 1, dtype).itemsize


@njit(**STRICT)
def tile(
    dtype: Any, weights: int, step: int, next_step: int, rows: int, panel: int, count: int, out: int, fresh: int
) -> None:
    """As lanes.panel_8, of any number of rows."""
    r = 0
    while r + 8 <= rows:
        panel_8(dtype, dtype, weights + r * step, step, next_step, panel, count, out + r * PANEL_BYTES, fresh)
        r += 8
    while r < rows:
        panel_1(dtype, dtype, weights + r * step, step, next_step, panel, count, out + r * PANEL_BYTES, fresh)
        r += 1


@njit(**STRICT)
def block_product(
    dtype: Any,
    kind: Any,
    w: int,
    inputs: int,
    outputs: int,
    scales: int,
    x: int,
    x_step: int,
    out: int,
    out_step: int,
    count: int,
    fresh: int,
    scratch: int,
) -> None:
    """out [panel][outputs] = or += w [outputs <= BLOCK_OUTPUTS, inputs] * scales . x [panel][inputs], `count` panels.

    Addresses, and steps of panels in bytes. Fetches the weights that follow.
    """
    step, item = inputs * size_of(kind), size_of(dtype)
    ahead, ahead_step = w + outputs * step, -(-outputs * size_of(kind) // count)
    if scales:
        _widen(dtype, kind, w, inputs, outputs, scales, scratch)
        w, step = scratch, inputs * item
    for p in range(count):
        panel, to = x + p * x_step, out + p * out_step
        for k in range(0, inputs, CHAIN):
            some, first = min(CHAIN, inputs - k), fresh if k == 0 else 0
            weights, values = w + k * item, panel + k * PANEL_BYTES
            if outputs == BLOCK_OUTPUTS:
                fetched = ahead + (p * inputs + k) * ahead_step
                panel_block(dtype, dtype, weights, step, values, some, to, first, fetched, ahead_step)
            else:
                tile(dtype, weights, step, item, outputs, values, some, to, first)


@njit(**STRICT)
def _widen(dtype: Any, kind: Any, w: int, inputs: int, outputs: int, scales: int, to: int) -> None:
    narrow, wide = carray(pointer(w), (outputs, inputs), kind), carray(pointer(to), (outputs, inputs), dtype)
    scale = carray(pointer(scales), outputs, dtype)
    for o in range(outputs):
        for i in range(inputs):
            wide[o, i] = narrow[o, i] * scale[o]


@njit(**STRICT)
def product(
    dtype: Any,
    kind: Any,
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
    """out [panel][outputs] = or += w [outputs, inputs] . x [panel][inputs] + biases, of `count` panels, each `step`-th.

    scales, biases: of all outputs, or 0. mode: ADDED; FRESH; GATED: out = silu(gate) * up, gate and up the halves of
    w [2 * outputs, inputs] . x.
    """
    x_step, out_step, size = inputs * PANEL_BYTES * step, outputs * PANEL_BYTES * step, size_of(dtype)
    ups, up_step = scratch + BLOCK_OUTPUTS * inputs * size, BLOCK_OUTPUTS * PANEL_BYTES
    passes, fresh = -(-count // max(1, PASS_BYTES // (inputs * PANEL_BYTES))), 0 if mode == ADDED else 1
    for n in range(passes):
        first, end = share(count, passes, n)
        here, panels = x + first * x_step, end - first
        for o in range(0, outputs, BLOCK_OUTPUTS):
            some, to = min(BLOCK_OUTPUTS, outputs - o), out + first * out_step + o * PANEL_BYTES
            for half in range(2 if mode == GATED else 1):
                at = o + half * outputs
                weights, scale = w + at * inputs * size_of(kind), scales + at * size if scales else 0
                result, result_step = (ups, up_step) if half else (to, out_step)
                block_product(
                    *(dtype, kind, weights, inputs, some, scale, here, x_step),
                    *(result, result_step, panels, fresh, scratch),
                )
            values = some * PANEL_BYTES // size
            for p in range(panels):
                if mode == GATED:
                    gate = carray(pointer(to + p * out_step), values, dtype)
                    gated(gate, carray(pointer(ups + p * up_step), values, dtype), gate)
                if biases:
                    add_biases(dtype, to + p * out_step, biases + o * size, some)


@njit(**FAST)
def add_biases(dtype: Any, out: int, biases: int, count: int) -> None:
    """To a panel's rows, one bias each."""
    lanes = PANEL_BYTES // size_of(dtype)
    values, bias = carray(pointer(out), (count, lanes), dtype), carray(pointer(biases), count, dtype)
    for i in range(count):
        for lane in range(lanes):
            values[i, lane] += bias[i]
