"""Dot products and weighted sums of a few rows as explicit vector code. Knows addresses and strides, no model.

The compiler's own vector code adds in another order for each shape; here an element's sum has one order, whatever rows
and outputs are computed beside it. What is read next is fetched ahead: a stream of weights or KV crosses a page every
few hundred nanoseconds, where the hardware's prefetcher stops.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

VECTOR_BYTES = 64
LINE_BYTES = 64

_I64, _I32, _BYTE = ir.IntType(64), ir.IntType(32), ir.IntType(8)

LOG2E = 1.4426950408889634
_ROUNDER, _LOWEST = float(3 << 22), -80.0
_POWERS = (1.535336188e-4, 1.339887440e-3, 9.618437357e-3, 5.550332471e-2, 2.402264791e-1, 6.931472028e-1, 1.0)
"""Cephes' polynomial for powers of two. What is below the lowest is as good as it beside 1, but its parts would be
denormal numbers, which cost a hundred times as much."""


class Code:
    """Writes vector instructions on elements of one type."""

    def __init__(self, builder: Any, dtype: Any) -> None:
        self.builder, self.size = builder, dtype.bitwidth // 8
        self.element = ir.FloatType() if self.size == 4 else ir.DoubleType()
        self.lanes = VECTOR_BYTES // self.size
        self.vector = ir.VectorType(self.element, self.lanes)
        self._suffix = f"v{self.lanes}f{dtype.bitwidth}"

    def load(self, address: Any, kind: Any, align: int) -> Any:
        """The value at an i64 address."""
        return self.builder.load(self.builder.inttoptr(address, ir.PointerType(kind)), align=align)

    def store(self, value: Any, address: Any) -> None:
        """To an i64 address."""
        self.builder.store(value, self.builder.inttoptr(address, ir.PointerType(value.type)), align=self.size)

    def offset(self, base: Any, step: Any, count: int) -> Any:
        """base + step * count."""
        return self.builder.add(base, self.builder.mul(step, _I64(count)))

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        """a * b + c of vectors."""
        return self._call(f"llvm.fma.{self._suffix}", self.vector, [a, b, c])

    def total(self, vector: Any) -> Any:
        """Of a vector's elements, as a tree."""
        start = ir.Constant(self.element, 0.0)
        name = f"llvm.vector.reduce.fadd.{self._suffix}"
        return self._call(name, self.element, [start, vector], fastmath=("reassoc",))

    def splat(self, value: Any) -> Any:
        """A vector of one value."""
        one = self.builder.insert_element(ir.Constant(self.vector, ir.Undefined), value, _I32(0))
        order = ir.Constant(ir.VectorType(_I32, self.lanes), [0] * self.lanes)
        return self.builder.shuffle_vector(one, ir.Constant(self.vector, ir.Undefined), order)

    def constant(self, value: float) -> Any:
        """A vector of a constant."""
        return ir.Constant(self.vector, [ir.Constant(self.element, value)] * self.lanes)

    def greater(self, a: Any, b: Any) -> Any:
        """Of each pair."""
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def exp2(self, x: Any) -> Any:
        """Powers of two, of numbers up to about 0; in float32 to about one unit in the last place."""
        builder, bits = self.builder, ir.VectorType(_I32, self.lanes)
        if self.size == 8:
            return self._call(f"llvm.exp.{self._suffix}", self.vector, [builder.fmul(x, self.constant(1 / LOG2E))])
        x = self.greater(x, self.constant(_LOWEST))
        shifted = builder.fadd(x, self.constant(_ROUNDER))
        rest = builder.fsub(x, builder.fsub(shifted, self.constant(_ROUNDER)))
        p = self.constant(_POWERS[0])
        for one in _POWERS[1:]:
            p = self.fma(p, rest, self.constant(one))
        power = builder.shl(builder.bitcast(shifted, bits), ir.Constant(bits, [23] * self.lanes))
        return builder.bitcast(builder.add(builder.bitcast(p, bits), power), self.vector)

    def sqrt(self, x: Any) -> Any:
        """Of a vector."""
        return self._call(f"llvm.sqrt.{self._suffix}", self.vector, [x])

    def fetch(self, address: Any, *, near: bool = True) -> None:
        """Brings a cache line into the first cache, or into the second."""
        line = self.builder.inttoptr(address, ir.PointerType(_BYTE))
        self._call("llvm.prefetch.p0", ir.VoidType(), [line, _I32(0), _I32(3 if near else 2), _I32(1)])

    def _call(self, name: str, result: Any, args: list[Any], **flags: Any) -> Any:
        kind = ir.FunctionType(result, [one.type for one in args])
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, name), args, **flags)


def _dots(rows: int, outputs: int, passes: int = 1) -> Any:
    """x [rows, count] . w [outputs, count] -> out [rows, outputs]; w of x's type or int8.

    Fetches the passes-th part of `outputs * count` weights from address `ahead` on.
    """

    def write(code: Code, kind: Any, args: list[Any]) -> None:
        builder = code.builder
        x, x_step, w, w_step, count, out, out_step, ahead = args
        narrow = kind == types.int8
        item, size = (_BYTE, 1) if narrow else (code.element, code.size)
        widen = builder.sitofp if narrow else lambda value, to: value
        xs = [code.offset(x, x_step, r) for r in range(rows)]
        ws = [code.offset(w, w_step, o) for o in range(outputs)]
        totals = [[cgutils.alloca_once(builder, code.vector) for _ in ws] for _ in xs]
        for one in sum(totals, []):
            builder.store(ir.Constant(code.vector, None), one)
        whole = builder.and_(count, _I64(-code.lanes))
        fetched = outputs * code.lanes * size // passes
        with cgutils.for_range_slice(builder, _I64(0), whole, _I64(code.lanes)) as (i, _):
            line = builder.add(ahead, builder.mul(i, _I64(fetched // code.lanes)))
            for n in range(max(1, fetched // LINE_BYTES)):
                code.fetch(builder.add(line, _I64(n * LINE_BYTES)))
            place = builder.mul(i, _I64(size))
            loaded = [
                widen(code.load(builder.add(one, place), ir.VectorType(item, code.lanes), size), code.vector)
                for one in ws
            ]
            for one, row in zip(xs, totals, strict=True):
                value = code.load(builder.add(one, builder.mul(i, _I64(code.size))), code.vector, code.size)
                for weight, total in zip(loaded, row, strict=True):
                    builder.store(code.fma(value, weight, builder.load(total)), total)
        for r, row in enumerate(totals):
            for o, total in enumerate(row):
                result = cgutils.alloca_once_value(builder, code.total(builder.load(total)))
                with cgutils.for_range_slice(builder, whole, count, _I64(1)) as (i, _):
                    value = code.load(builder.add(xs[r], builder.mul(i, _I64(code.size))), code.element, code.size)
                    weight = widen(code.load(builder.add(ws[o], builder.mul(i, _I64(size))), item, size), code.element)
                    builder.store(builder.fadd(builder.load(result), builder.fmul(value, weight)), result)
                code.store(builder.load(result), builder.add(code.offset(out, out_step, r), _I64(o * code.size)))

    @intrinsic
    def dots(  # type: ignore[no-untyped-def]
        typingctx, dtype, kind, x, x_step, w, w_step, count, out, out_step, ahead
    ):
        return signature((dtype, kind), 8), generator(write)

    return dots


def _sums(rows: int, vectors: int) -> Any:
    """out [rows, vectors * lanes] += weights [rows, count] . values [count, vectors * lanes], one after the other.

    Fetches as much as it reads of values, from address `ahead` on.
    """

    def write(code: Code, kind: Any, args: list[Any]) -> None:
        builder = code.builder
        weights, weights_step, values, values_step, count, out, out_step, ahead = args
        columns = [
            [builder.add(code.offset(out, out_step, r), _I64(v * VECTOR_BYTES)) for v in range(vectors)]
            for r in range(rows)
        ]
        totals = [
            [cgutils.alloca_once_value(builder, code.load(one, code.vector, code.size)) for one in row]
            for row in columns
        ]
        with cgutils.for_range_slice(builder, _I64(0), count, _I64(1)) as (t, _):
            token = builder.mul(t, values_step)
            for v in range(vectors):
                code.fetch(builder.add(builder.add(ahead, token), _I64(v * VECTOR_BYTES)))
            loaded = [
                code.load(builder.add(builder.add(values, token), _I64(v * VECTOR_BYTES)), code.vector, code.size)
                for v in range(vectors)
            ]
            for r, row in enumerate(totals):
                at = builder.add(code.offset(weights, weights_step, r), builder.mul(t, _I64(code.size)))
                weight = code.splat(code.load(at, code.element, code.size))
                for value, total in zip(loaded, row, strict=True):
                    builder.store(code.fma(weight, value, builder.load(total)), total)
        for places, row in zip(columns, totals, strict=True):
            for place, total in zip(places, row, strict=True):
                code.store(builder.load(total), place)

    @intrinsic
    def sums(  # type: ignore[no-untyped-def]
        typingctx, dtype, kind, weights, weights_step, values, values_step, count, out, out_step, ahead
    ):
        return signature((dtype, kind), 8), generator(write)

    return sums


def signature(classes: tuple[Any, ...], numbers: int) -> Any:
    """Of a function of types and int64s."""
    return types.void(*classes, *[types.int64] * numbers)


def generator(write: Callable[[Code, Any, list[Any]], None]) -> Any:
    """write: (code of the first type, the second type, the numbers)."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        write(Code(builder, signature.args[0].instance_type), signature.args[1].instance_type, list(args[2:]))
        return context.get_dummy_value()

    return generate


dots_1_1 = _dots(1, 1)
dots_1_4, dots_2_4, dots_3_4, dots_4_4 = (_dots(rows, 4) for rows in (1, 2, 3, 4))
dots_4_4_half = _dots(4, 4, 2)
sums_1_4, sums_2_4, sums_3_4, sums_4_4 = (_sums(rows, 4) for rows in (1, 2, 3, 4))
