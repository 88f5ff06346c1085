"""float32 products in AMX tiles, as explicit code: each number as three bfloat16 that add up to it. Knows no model.

A float32 has 24 bits, a bfloat16 8: x = high + middle + low, exactly. Of the nine products of two numbers' parts six
are taken; the others are below a float32's last bit. Sums are float32's. What a token gets depends on its lane alone.

A step is TILED inputs of 32 outputs or of a panel: six tiles of 16 rows of 64 bytes, [part][half]. Inputs i and
i + 16 of a step stand beside each other in a row.
"""

from collections.abc import Callable
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
_SUMS, _OUTPUTS, _TOKENS = (0, 1, 2, 3), (4, 5), (6, 7)
"""Numbers of tiles: sums [output half][token half], parts of outputs' weights, parts of tokens' values."""
_PAIRS = (0, 2), (0, 1), (0, 0), (1, 0), (1, 1), (2, 0)
"""Parts that are multiplied, so ordered that one of them mostly stays where it is. 0: high."""

_I64, _I32, _I16, _I8 = ir.IntType(64), ir.IntType(32), ir.IntType(16), ir.IntType(8)


def _call(code: Code, name: str, *args: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [one.type for one in args])
    code.builder.call(cgutils.get_or_insert_function(code.builder.module, kind, f"llvm.x86.{name}"), args)


def _at(code: Code, address: Any) -> Any:
    return code.builder.inttoptr(address, ir.PointerType(_I8))


def _write_configure(code: Code, kind: Any, args: list[Any]) -> None:
    """Palette 1; eight tiles of 16 rows of 64 bytes."""
    settings = [1, *[0] * 15, *[64, 0] * 8, *[0] * 16, *[_ROWS] * 8, *[0] * 8]
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


def _split_row(
    code: Code,
    kind: Any,
    rows: list[Any],
    scales: list[Any],
    row_bytes: Any,
    s: Any,
    r: Any,
    out: Any,
    ahead: Any = None,
) -> None:
    """Step s of row r of two times 16. rows, scales: where both begin. Fetches what is `ahead` bytes further."""
    builder, narrow = code.builder, kind == types.int8
    element, size = (_I8, 1) if narrow else (code.element, code.size)
    column = builder.add(builder.mul(r, row_bytes), builder.mul(s, _I64(TILED * size)))
    place = builder.add(builder.mul(s, _I64(STEP_BYTES)), builder.mul(r, _I64(VECTOR_BYTES)))
    for half in range(2):
        at = builder.add(rows[half], column)
        for line in range(0, 2 * _ROWS * size if ahead is not None else 0, LINE_BYTES):
            code.fetch(builder.add(builder.add(at, ahead), _I64(line)), near=False)
        pair = [
            code.load(builder.add(at, _I64(n * _ROWS * size)), ir.VectorType(element, code.lanes), size)
            for n in range(2)
        ]
        if narrow:
            scale_at = builder.add(scales[half], builder.mul(r, _I64(code.size)))
            scale = code.splat(code.load(scale_at, code.element, code.size))
            pair = [builder.fmul(builder.sitofp(value, code.vector), scale) for value in pair]
        for part, value in enumerate(parts_of(code, *pair)):
            code.store(value, builder.add(builder.add(out, place), _I64((2 * part + half) * TILE_BYTES)))


def _write_split_rows(code: Code, kind: Any, args: list[Any]) -> None:
    first, second, row_bytes, steps, first_scales, second_scales, out = args
    with cgutils.for_range_slice(code.builder, _I64(0), steps, _I64(1)) as (s, _):
        with cgutils.for_range_slice(code.builder, _I64(0), _I64(_ROWS), _I64(1)) as (r, _):
            _split_row(code, kind, [first, second], [first_scales, second_scales], row_bytes, s, r, out)


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

    beside: what is written into each step, one before each pair of parts; tiles keep the units for vectors idle.
    """
    builder = code.builder
    places = [builder.add(out, _I64(n // 2 * _ROWS * PANEL_BYTES + n % 2 * VECTOR_BYTES)) for n in _SUMS]
    with builder.if_else(builder.icmp_signed("!=", fresh, _I64(0))) as (nothing, something):
        with nothing:
            for tile in _SUMS:
                _call(code, "tilezero", _I8(tile))
        with something:
            for tile, place in zip(_SUMS, places, strict=True):
                _call(code, "tileloadd64", _I8(tile), _at(code, place), _I64(PANEL_BYTES))

    def load(tiles: tuple[int, ...], base: Any, part: int) -> None:
        for half, tile in enumerate(tiles):
            at = builder.add(base, _I64((2 * part + half) * TILE_BYTES))
            _call(code, "tileloadd64", _I8(tile), _at(code, at), _I64(VECTOR_BYTES))

    with cgutils.for_range_slice(builder, _I64(0), steps, _I64(1)) as (s, _):
        offset = builder.mul(s, _I64(STEP_BYTES))
        before: tuple[int | None, int | None] = (None, None)
        for pair, write in zip_longest(_PAIRS, beside):
            if write:
                write(s)
            for tiles, base, part, last in zip((_OUTPUTS, _TOKENS), (weights, values), pair, before, strict=True):
                if part != last:
                    load(tiles, builder.add(base, offset), part)
            before = pair
            for n, tile in enumerate(_SUMS):
                _call(code, "tdpbf16ps", _I8(tile), _I8(_OUTPUTS[n // 2]), _I8(_TOKENS[n % 2]))
    for tile, place in zip(_SUMS, places, strict=True):
        _call(code, "tilestored64", _I8(tile), _at(code, place), _I64(PANEL_BYTES))


def _write_multiply_beside(code: Code, kind: Any, args: list[Any]) -> None:
    builder = code.builder
    first, apart, row_bytes, first_scales, scales_apart, split, begin, end, ahead = args[4:]
    rows, scales = [first, builder.add(first, apart)], [first_scales, builder.add(first_scales, scales_apart)]

    def each(s: Any) -> None:
        with cgutils.for_range_slice(builder, begin, end, _I64(1)) as (r, _):
            _split_row(code, kind, rows, scales, row_bytes, s, r, split, ahead)

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
