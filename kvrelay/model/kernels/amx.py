"""float32 products in AMX tiles, as explicit code: each number as three bfloat16 that add up to it. Knows no model.

A float32 has 24 bits, a bfloat16 8: x = high + middle + low, exactly. Of the nine products of two numbers' parts six
are taken; the others are below a float32's last bit. Sums are float32's. What a token gets depends on its lane alone.

A step is TILED inputs of 32 outputs or of a panel: six tiles of 16 rows of 64 bytes, [part][half]. Inputs i and
i + 16 of a step stand beside each other in a row.
"""

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kvrelay.model.kernels.block import PANEL_BYTES, TILED
from kvrelay.model.kernels.vectors import LINE_BYTES, VECTOR_BYTES, Code, generator, signature

TILE_BYTES = 1024
STEP_BYTES = 6 * TILE_BYTES
_ROWS = 16
_SUMS, _OUTPUTS, _TOKENS = (0, 1), 2, 3
"""Numbers of tiles: sums of each output half, a part of the outputs' weights, a part of the tokens' values.

Four of eight. With all in use a product takes two to four times as long in some moments, most likely those in which a
thread of somebody else shares the core, and tiles are renamed no more; in others four are as fast (bench/LOG.md).
"""
_PAIRS = (2, 0), (1, 0), (1, 1), (0, 1), (0, 0), (0, 2)
"""Parts that are multiplied, so ordered that one of them stays where it is. 0: high."""

_I64, _I32, _I16, _I8 = ir.IntType(64), ir.IntType(32), ir.IntType(16), ir.IntType(8)


def _call(code: Code, name: str, *args: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [one.type for one in args])
    code.builder.call(cgutils.get_or_insert_function(code.builder.module, kind, f"llvm.x86.{name}"), args)


def _at(code: Code, address: Any) -> Any:
    return code.builder.inttoptr(address, ir.PointerType(_I8))


def _nth(code: Code, base: Any, step: Any, n: Any) -> Any:
    return code.builder.add(base, code.builder.mul(step, n))


def _write_configure(code: Code, kind: Any, args: list[Any]) -> None:
    """Palette 1; four tiles of 16 rows of 64 bytes."""
    settings = [1, *[0] * 15, *[64, 0] * 4, *[0] * 24, *[_ROWS] * 4, *[0] * 12]
    wanted = ir.Constant(ir.ArrayType(_I8, 64), [_I8(value) for value in settings])
    place = cgutils.alloca_once_value(code.builder, wanted)
    _call(code, "ldtilecfg", code.builder.bitcast(place, ir.PointerType(_I8)))


@intrinsic
def configure(typingctx, dtype, kind):  # type: ignore[no-untyped-def]
    """Before anything else here, on each thread."""
    return signature((dtype, kind), 0), generator(_write_configure)


@intrinsic
def release(typingctx, dtype, kind):  # type: ignore[no-untyped-def]
    """The tiles are not needed any more."""
    return signature((dtype, kind), 0), generator(lambda code, kind, args: _call(code, "tilerelease"))


def parts_of(code: Code, low: Any, high: Any) -> list[Any]:
    """Two vectors of float32 -> three of pairs of bfloat16."""
    builder, words = code.builder, ir.VectorType(_I32, code.lanes)
    half, mask, shift = (ir.Constant(words, [value] * code.lanes) for value in (0x8000, 0xFFFF0000, 16))
    found, rests = [], [low, high]
    for part in range(3):
        bits = [builder.bitcast(rest, words) for rest in rests]
        if part < 2:
            bits = [builder.and_(builder.add(value, half), mask) for value in bits]
            taken = [builder.bitcast(value, code.vector) for value in bits]
            rests = [builder.fsub(rest, value) for rest, value in zip(rests, taken, strict=True)]
        found.append(builder.or_(builder.lshr(bits[0], shift), bits[1]))
    return found


def _write_split_inputs(code: Code, kind: Any, args: list[Any]) -> None:
    builder = code.builder
    rows, row_bytes, steps, out = args
    with cgutils.for_range_slice(builder, _I64(0), steps, _I64(1)) as (s, _):
        source = builder.add(rows, builder.mul(s, code.offset(_I64(0), row_bytes, TILED)))
        to = builder.add(out, builder.mul(s, _I64(STEP_BYTES)))
        with cgutils.for_range_slice(builder, _I64(0), _I64(_ROWS), _I64(1)) as (i, _):
            row = builder.add(source, builder.mul(i, row_bytes))
            place = builder.add(to, builder.mul(i, _I64(VECTOR_BYTES)))
            for half in range(2):
                at = builder.add(row, _I64(half * VECTOR_BYTES))
                pair = [code.load(code.offset(at, row_bytes, n * _ROWS), code.vector, code.size) for n in range(2)]
                for part, value in enumerate(parts_of(code, *pair)):
                    code.store(value, builder.add(place, _I64((2 * part + half) * TILE_BYTES)))


@intrinsic
def split_inputs(typingctx, dtype, kind, rows, row_bytes, steps, out):  # type: ignore[no-untyped-def]
    """steps * TILED rows of which 32 numbers are taken -> their parts, steps * STEP_BYTES."""
    return signature((dtype, kind), 4), generator(_write_split_inputs)


def _write_transpose(code: Code, kind: Any, args: list[Any]) -> None:
    builder, words = code.builder, ir.VectorType(_I32, code.lanes)
    with cgutils.for_range_slice(builder, _I64(0), args[1], _I64(1)) as (t, _):
        tile = builder.add(args[0], builder.mul(t, _I64(TILE_BYTES)))
        places = [builder.add(tile, _I64(row * VECTOR_BYTES)) for row in range(_ROWS)]
        rows = [code.load(place, words, code.size) for place in places]
        for apart in (8, 4, 2, 1):
            kept = [lane if not lane & apart else _ROWS + lane - apart for lane in range(_ROWS)]
            moved = [lane + apart if not lane & apart else _ROWS + lane for lane in range(_ROWS)]
            for n in range(_ROWS):
                if not n & apart:
                    one, other = rows[n], rows[n + apart]
                    for at, order in ((n, kept), (n + apart, moved)):
                        rows[at] = builder.shuffle_vector(one, other, ir.Constant(words, order))
        for place, row in zip(places, rows, strict=True):
            code.store(row, place)


@intrinsic
def transpose(typingctx, dtype, kind, tiles, count):  # type: ignore[no-untyped-def]
    """Tiles that follow each other, in place: 16 rows of 16 pairs each."""
    return signature((dtype, kind), 2), generator(_write_transpose)


def _split_row(code: Code, kind: Any, at: Any, scale_at: Any, out: Any, ahead: Any = None) -> None:
    """A step of one row: TILED numbers at `at`. out: where the first part goes. Fetches what is `ahead` bytes on."""
    builder, narrow = code.builder, kind == types.int8
    element, size = (_I8, 1) if narrow else (code.element, code.size)
    for line in range(0, TILED * size if ahead is not None else 0, LINE_BYTES):
        code.fetch(builder.add(builder.add(at, ahead), _I64(line)), near=False)
    pair = [
        code.load(builder.add(at, _I64(n * _ROWS * size)), ir.VectorType(element, code.lanes), size) for n in range(2)
    ]
    if narrow:
        scale = code.splat(code.load(scale_at, code.element, code.size))
        pair = [builder.fmul(builder.sitofp(value, code.vector), scale) for value in pair]
    for part, value in enumerate(parts_of(code, *pair)):
        code.store(value, builder.add(out, _I64(2 * part * TILE_BYTES)))


def _split_half(
    code: Code,
    kind: Any,
    rows: Any,
    scales: Any,
    row_bytes: Any,
    s: Any,
    out: Any,
    begin: Any,
    end: Any,
    ahead: Any = None,
) -> None:
    """Step s of rows begin .. end of 16. rows, scales, out: where those of the first row begin."""
    builder, size = code.builder, 1 if kind == types.int8 else code.size
    column = builder.add(rows, builder.mul(s, _I64(TILED * size)))
    place = builder.add(out, builder.mul(s, _I64(STEP_BYTES)))
    with cgutils.for_range_slice(builder, begin, end, _I64(1)) as (r, _):
        at, scale_at = _nth(code, column, row_bytes, r), _nth(code, scales, _I64(code.size), r)
        _split_row(code, kind, at, scale_at, _nth(code, place, _I64(VECTOR_BYTES), r), ahead)


def _write_split_rows(code: Code, kind: Any, args: list[Any]) -> None:
    first, second, row_bytes, steps, first_scales, second_scales, out = args
    with cgutils.for_range_slice(code.builder, _I64(0), steps, _I64(1)) as (s, _):
        for half, (rows, scales) in enumerate(((first, first_scales), (second, second_scales))):
            to = code.builder.add(out, _I64(half * TILE_BYTES))
            _split_half(code, kind, rows, scales, row_bytes, s, to, _I64(0), _I64(_ROWS))


@intrinsic
def split_rows(  # type: ignore[no-untyped-def]
    typingctx, dtype, kind, first, second, row_bytes, steps, first_scales, second_scales, out
):
    """Two times 16 rows of steps * TILED float32, or of int8 with a scale a row -> their parts, as of a panel."""
    return signature((dtype, kind), 7), generator(_write_split_rows)


def multiplied(
    code: Code, weights: Any, values: Any, steps: Any, out: Any, fresh: Any, *beside: Callable[[Any], None]
) -> None:
    """out [32, lanes] += weights [32, steps] . values [steps, lanes], in parts; fresh: what is in out counts as 0.

    First of one half of the lanes, then of the other, each in `steps` half-steps. beside: what is written into each of
    these (0 .. 2 steps), one before each pair of parts; tiles keep the units for vectors idle.
    """
    with cgutils.for_range_slice(code.builder, _I64(0), _I64(2), _I64(1)) as (half, _):
        to, tokens = _nth(code, out, _I64(VECTOR_BYTES), half), _nth(code, values, _I64(TILE_BYTES), half)
        _multiply_half(code, weights, tokens, steps, to, fresh, code.builder.mul(half, steps), beside)


def _multiply_half(
    code: Code,
    weights: Any,
    values: Any,
    steps: Any,
    out: Any,
    fresh: Any,
    first: Any,
    beside: Sequence[Callable[[Any], None]],
) -> None:
    """Of 16 lanes; its half-steps are first .. first + steps."""
    builder = code.builder
    places = [code.offset(out, _I64(_ROWS * PANEL_BYTES), half) for half in range(2)]
    with builder.if_else(builder.icmp_signed("!=", fresh, _I64(0))) as (nothing, something):
        with nothing:
            for tile in _SUMS:
                _call(code, "tilezero", _I8(tile))
        with something:
            for tile, place in zip(_SUMS, places, strict=True):
                _call(code, "tileloadd64", _I8(tile), _at(code, place), _I64(PANEL_BYTES))

    def load(tile: int, base: Any, part: int, half: int) -> None:
        at = builder.add(base, _I64((2 * part + half) * TILE_BYTES))
        _call(code, "tileloadd64", _I8(tile), _at(code, at), _I64(VECTOR_BYTES))

    with cgutils.for_range_slice(builder, _I64(0), steps, _I64(1)) as (s, _):
        offset, halves = builder.mul(s, _I64(STEP_BYTES)), (0, 1)
        output, token = None, None
        for pair, write in zip_longest(_PAIRS, beside):
            if write:
                write(builder.add(first, s))
            for half in halves:
                if output != (pair[0], half):
                    load(_OUTPUTS, builder.add(weights, offset), pair[0], half)
                if token != pair[1]:
                    load(_TOKENS, builder.add(values, offset), pair[1], 0)
                output, token = (pair[0], half), pair[1]
                _call(code, "tdpbf16ps", _I8(_SUMS[half]), _I8(_OUTPUTS), _I8(_TOKENS))
            halves = halves[1], halves[0]
    for tile, place in zip(_SUMS, places, strict=True):
        _call(code, "tilestored64", _I8(tile), _at(code, place), _I64(PANEL_BYTES))


def _write_multiply_beside(code: Code, kind: Any, args: list[Any]) -> None:
    builder = code.builder
    first, apart, row_bytes, first_scales, scales_apart, split, begin, end, ahead = args[4:]

    def each(t: Any) -> None:
        s, half = builder.lshr(t, _I64(1)), builder.and_(t, _I64(1))
        rows, scales = _nth(code, first, apart, half), _nth(code, first_scales, scales_apart, half)
        to = _nth(code, split, _I64(TILE_BYTES), half)
        _split_half(code, kind, rows, scales, row_bytes, s, to, begin, end, ahead)

    multiplied(code, *args[:4], _I64(1), each)


@intrinsic
def multiply_beside(  # type: ignore[no-untyped-def]
    typingctx,
    dtype,
    kind,
    weights,
    values,
    steps,
    out,
    first,
    apart,
    row_bytes,
    scales,
    scales_apart,
    split,
    begin,
    end,
    ahead,
):
    """out [32, lanes] = weights [32, steps] . values [steps, lanes], in parts.

    Beside it, as split_rows(): rows begin .. end at `first`, and `apart` bytes further. Fetches what is `ahead` bytes
    from these.
    """
    return signature((dtype, kind), 13), generator(_write_multiply_beside)
