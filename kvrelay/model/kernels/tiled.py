"""Products of panels in AMX tiles. Knows no layer and no sequence; same results and arguments as `panels.product`."""

from typing import Any

from numba import carray, njit

from kvrelay.model.kernels.amx import configure, multiply_beside, release, split_inputs, split_rows
from kvrelay.model.kernels.block import ADDED, FRESH, GATED, PANEL_BYTES, PARTS_BYTES, TILED, TILED_PASS_BYTES
from kvrelay.model.kernels.panels import add_biases, size_of
from kvrelay.model.kernels.rows import gated
from kvrelay.model.kernels.team import FAST, STRICT, pointer, share

_ROWS = 16
_SLICE_INPUTS = 640
"""Inputs whose parts, of two blocks of weights and of a chunk's panels, fit into a second cache."""


@njit(**STRICT)
def tiled_product(
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
    """inputs, outputs: multiples of TILED."""
    slices = 1 if mode != ADDED else (inputs + _SLICE_INPUTS - 1) // _SLICE_INPUTS
    for n in range(slices):
        first, end = share(inputs // TILED, slices, n)
        at, some, first_biases = first * TILED, (end - first) * TILED, 0 if n else biases
        _slice(
            *(dtype, kind, w + at * size_of(kind), inputs * size_of(kind), some, outputs, scales),
            *(first_biases, x + at * PANEL_BYTES, inputs * PANEL_BYTES * step),
            *(out, outputs * PANEL_BYTES * step, count, mode, scratch),
        )


@njit(**STRICT)
def _slice(
    dtype: Any,
    kind: Any,
    w: int,
    row: int,
    inputs: int,
    outputs: int,
    scales: int,
    biases: int,
    x: int,
    x_step: int,
    out: int,
    out_step: int,
    count: int,
    mode: int,
    scratch: int,
) -> None:
    """Of `inputs` inputs. row, x_step, out_step: bytes from one row of weights, or panel, to the next."""
    steps, size = inputs // TILED, size_of(dtype)
    each = _ROWS if mode == GATED else TILED
    apart = outputs if mode == GATED else _ROWS  # rows from the first 16 of a block to the second
    panel_bytes, scales_apart = inputs * PARTS_BYTES, apart * size if scales else 0
    # Two blocks of weights: one that multiplies, and one that becomes the next meanwhile.
    here, there, sums = scratch, scratch + panel_bytes, scratch + 2 * panel_bytes
    panels = sums + TILED * PANEL_BYTES
    passes = -(-count // max(1, TILED_PASS_BYTES // panel_bytes))
    configure(dtype, dtype)
    for n in range(passes):
        first, end = share(count, passes, n)
        for p in range(first, end):
            split_inputs(dtype, dtype, x + p * x_step, PANEL_BYTES, steps, panels + (p - first) * panel_bytes)
        split_rows(dtype, kind, w, w + apart * row, row, steps, scales, scales + scales_apart, here)
        for o in range(0, outputs, each):
            after = o + each
            scale = scales + after * size if scales else 0
            for p in range(first, end):
                to, values = out + p * out_step + o * PANEL_BYTES, panels + (p - first) * panel_bytes
                target = to if mode == FRESH else sums
                begin, stop = share(_ROWS if after < outputs else 0, end - first, p - first)
                multiply_beside(
                    *(dtype, kind, here, values, steps, target),
                    *(w + after * row, apart * row, row, scale, scales_apart),
                    *(there, begin, stop, each * row),
                )
                if mode != FRESH:
                    _put(dtype, sums, to, each, mode)
                if biases:
                    add_biases(dtype, to, biases + o * size, each)
            here, there = there, here
    release(dtype, dtype)


@njit(**FAST)
def _put(dtype: Any, sums: int, out: int, rows: int, mode: int) -> None:
    """A block's sums to where they belong."""
    count = rows * PANEL_BYTES // size_of(dtype)
    found, to = carray(pointer(sums), count, dtype), carray(pointer(out), count, dtype)
    if mode == GATED:
        gated(found, carray(pointer(sums + rows * PANEL_BYTES), count, dtype), to)
    else:
        for i in range(count):
            to[i] += found[i]
