"""Products and softmax with one token a lane, as explicit vector code. Knows panels' addresses, no model.

Nothing is added across lanes: what a token gets depends on its own lane, and on the order of what is added to it.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

from kvrelay.model.kernels.block import BLOCK_OUTPUTS, PANEL_BYTES
from kvrelay.model.kernels.vectors import VECTOR_BYTES, Code, generator, signature

_I64, _I32 = ir.IntType(64), ir.IntType(32)
_LOWEST_SCORE = -1e30


def _places(code: Code, base: Any, row: Any) -> list[Any]:
    """Addresses of a panel row's two vectors."""
    first = code.builder.add(base, code.builder.mul(row, _I64(PANEL_BYTES)))
    return [first, code.builder.add(first, _I64(VECTOR_BYTES))]


def _loaded(code: Code, base: Any, row: Any) -> list[Any]:
    return [code.load(at, code.vector, code.size) for at in _places(code, base, row)]


def _store(code: Code, values: list[Any], base: Any, row: Any) -> None:
    for value, at in zip(values, _places(code, base, row), strict=True):
        code.store(value, at)


def _unless(code: Code, fresh: Any, values: list[Any], instead: Any) -> list[Any]:
    """What was there before; instead of it, if what is there counts for nothing."""
    is_fresh = code.builder.icmp_signed("!=", fresh, _I64(0))
    return [code.builder.select(is_fresh, instead, value) for value in values]


def _kept(code: Code, values: list[Any]) -> list[Any]:
    """Variables with these values at first."""
    return [cgutils.alloca_once_value(code.builder, value) for value in values]


def _add_product(
    code: Code,
    starts: list[Any],
    next_step: Any,
    panel: Any,
    count: Any,
    out: Any,
    fresh: Any,
    each: Callable[[Any], None],
) -> None:
    """out [rows, lanes] += weights . panel [count, lanes]; fresh: what is in out counts as 0.

    The product is summed up by itself: added one by one to a large number, its terms would lose their last bits.
    starts: where each row of weights begins; next_step: bytes from one to the next. each: called for every index.
    """
    builder, rows = code.builder, [_I64(row) for row in range(len(starts))]
    totals = [_kept(code, [code.constant(0)] * 2) for _ in rows]
    with cgutils.for_range_slice(builder, _I64(0), count, _I64(1)) as (k, _):
        each(k)
        values, at = _loaded(code, panel, k), builder.mul(k, next_step)
        for start, pair in zip(starts, totals, strict=True):
            weight = code.splat(code.load(builder.add(start, at), code.element, code.size))
            for value, total in zip(values, pair, strict=True):
                builder.store(code.fma(weight, value, builder.load(total)), total)
    for row, pair in zip(rows, totals, strict=True):
        before = _unless(code, fresh, _loaded(code, out, row), code.constant(0))
        _store(
            code, [builder.fadd(builder.load(total), old) for total, old in zip(pair, before, strict=True)], out, row
        )


def _panel(rows: int) -> Any:
    """out [rows, lanes] += weights [rows, count] . panel [count, lanes]; fresh: what is in out counts as 0.

    step, next_step: bytes from a weight to that of the next row, and to the next of its row.
    """

    def write(code: Code, kind: Any, args: list[Any]) -> None:
        weights, step, next_step, panel, count, out, fresh = args
        starts = [code.offset(weights, step, r) for r in range(rows)]
        _add_product(code, starts, next_step, panel, count, out, fresh, lambda k: None)

    @intrinsic
    def product(  # type: ignore[no-untyped-def]
        typingctx, dtype, kind, weights, step, next_step, panel, count, out, fresh
    ):
        return signature((dtype, kind), 7), generator(write)

    return product


def _write_block(code: Code, kind: Any, args: list[Any]) -> None:
    weights, step, panel, count, out, fresh, ahead, ahead_step = args
    starts = [code.offset(weights, step, r) for r in range(BLOCK_OUTPUTS)]

    def fetch(k: Any) -> None:
        code.fetch(code.builder.add(ahead, code.builder.mul(k, ahead_step)))

    _add_product(code, starts, _I64(code.size), panel, count, out, fresh, fetch)


@intrinsic
def panel_block(  # type: ignore[no-untyped-def]
    typingctx, dtype, kind, weights, step, panel, count, out, fresh, ahead, ahead_step
):
    """As _panel(BLOCK_OUTPUTS), of weights that follow each other; fetches, ahead_step bytes further each time."""
    return signature((dtype, kind), 8), generator(_write_block)


def _write_norm(code: Code, kind: Any, args: list[Any]) -> None:
    builder, one = code.builder, _I64(1)
    x, weights, eps_at, out, count = args
    totals = _kept(code, [code.constant(0)] * 2)
    with cgutils.for_range_slice(builder, _I64(0), count, one) as (i, _):
        for value, total in zip(_loaded(code, x, i), totals, strict=True):
            builder.store(code.fma(value, value, builder.load(total)), total)
    eps = code.splat(code.load(eps_at, code.element, code.size))
    number = code.splat(builder.sitofp(count, code.element))
    means = [builder.fadd(builder.fdiv(builder.load(total), number), eps) for total in totals]
    scales = [builder.fdiv(code.constant(1), code.sqrt(mean)) for mean in means]
    with cgutils.for_range_slice(builder, _I64(0), count, one) as (i, _):
        at = builder.add(weights, builder.mul(i, _I64(code.size)))
        weight = code.splat(code.load(at, code.element, code.size))
        normed = [builder.fmul(value, scale) for value, scale in zip(_loaded(code, x, i), scales, strict=True)]
        _store(code, [builder.fmul(value, weight) for value in normed], out, i)


@intrinsic
def norm(typingctx, dtype, kind, x, weights, eps_at, out, count):  # type: ignore[no-untyped-def]
    """Each token's RMS norm over its features x [count, lanes], times the weights [count]."""
    return signature((dtype, kind), 5), generator(_write_norm)


def _write_weigh(code: Code, kind: Any, args: list[Any]) -> None:
    builder, one = code.builder, _I64(1)
    scores, count, hidden, scale_at, state, head_dim, fresh = args
    total_row, lowest, nothing = builder.add(head_dim, one), code.constant(_LOWEST_SCORE), code.constant(0)
    scale = code.splat(code.load(scale_at, code.element, code.size))
    before = _unless(code, fresh, _loaded(code, state, head_dim), lowest)
    tops = _kept(code, before)
    with cgutils.for_range_slice(builder, _I64(0), count, one) as (t, _):
        scaled = [builder.fmul(score, scale) for score in _loaded(code, scores, t)]
        seen = _seen(code, builder.add(hidden, t), scaled, lowest)
        _store(code, seen, scores, t)
        for score, top in zip(seen, tops, strict=True):
            builder.store(code.greater(score, builder.load(top)), top)
    best = [builder.load(top) for top in tops]
    factors = [code.exp(builder.fsub(old, new)) for old, new in zip(before, best, strict=True)]
    so_far = _unless(code, fresh, _loaded(code, state, total_row), nothing)
    totals = _kept(code, [builder.fmul(old, factor) for old, factor in zip(so_far, factors, strict=True)])
    with cgutils.for_range_slice(builder, _I64(0), count, one) as (t, _):
        scored = zip(_loaded(code, scores, t), best, strict=True)
        weights = [code.exp(builder.fsub(score, top)) for score, top in scored]
        weights = _seen(code, builder.add(hidden, t), weights, nothing)
        _store(code, weights, scores, t)
        for weight, total in zip(weights, totals, strict=True):
            builder.store(builder.fadd(builder.load(total), weight), total)
    with cgutils.for_range_slice(builder, _I64(0), head_dim, one) as (i, _):
        sums = zip(_loaded(code, state, i), factors, strict=True)
        _store(code, [builder.fmul(value, factor) for value, factor in sums], state, i)
    _store(code, best, state, head_dim)
    _store(code, [builder.load(total) for total in totals], state, total_row)


def _seen(code: Code, hidden: Any, values: list[Any], instead: Any) -> list[Any]:
    """Values of a pair of vectors; instead of the first `hidden` lanes', another."""
    builder, lanes = code.builder, ir.VectorType(_I32, code.lanes)
    nowhere, order = ir.Constant(lanes, ir.Undefined), ir.Constant(lanes, [0] * code.lanes)
    limit = builder.shuffle_vector(
        builder.insert_element(nowhere, builder.trunc(hidden, _I32), _I32(0)), nowhere, order
    )
    found = []
    for v, value in enumerate(values):
        numbers = ir.Constant(lanes, [v * code.lanes + n for n in range(code.lanes)])
        found.append(builder.select(builder.icmp_signed("<", numbers, limit), instead, value))
    return found


@intrinsic
def weigh(  # type: ignore[no-untyped-def]
    typingctx, dtype, kind, scores, count, hidden, scale_at, state, head_dim, fresh
):
    """Scores [count, lanes] -> exp(scale * score - best). state [head_dim + 2, lanes]: weighted values, best, total.

    Of token t the first `hidden + t` lanes see nothing. Values and total so far are multiplied by what makes them
    relative to the new best; fresh: nothing was so far, and the values are undefined.
    """
    return signature((dtype, kind), 7), generator(_write_weigh)


panel_1, panel_8 = _panel(1), _panel(8)
