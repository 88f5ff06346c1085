"""Products and softmax with one token a lane, as explicit vector code. Knows panels' addresses, no model.

Nothing is added across lanes: what a token gets depends on its own lane, and on the order of what is added to it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

from kvrelay.model.kernels.block import BLOCK_OUTPUTS, PANEL_BYTES
from kvrelay.model.kernels.vectors import LOG2E, VECTOR_BYTES, Code, generator, signature

_I64, _I32 = ir.IntType(64), ir.IntType(32)
_LOWEST_SCORE = -1e30


def _places(code: Code, base: Any, row: Any) -> list[Any]:
    """Addresses of a panel row's two vectors."""
    first = code.builder.add(base, code.builder.mul(row, _I64(PANEL_BYTES)))
    return [first, code.builder.add(first, _I64(VECTOR_BYTES))]


def loaded(code: Code, base: Any, row: Any) -> list[Any]:
    return [code.load(at, code.vector, code.size) for at in _places(code, base, row)]


def store(code: Code, values: list[Any], base: Any, row: Any) -> None:
    for value, at in zip(values, _places(code, base, row), strict=True):
        code.store(value, at)


def _unless(code: Code, fresh: Any, values: list[Any], instead: Any) -> list[Any]:
    """What was there before; instead of it, if what is there counts for nothing."""
    is_fresh = code.builder.icmp_signed("!=", fresh, _I64(0))
    return [code.builder.select(is_fresh, instead, value) for value in values]


def kept(code: Code, values: list[Any]) -> list[Any]:
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
    totals = [kept(code, [code.constant(0)] * 2) for _ in rows]
    with cgutils.for_range_slice(builder, _I64(0), count, _I64(1)) as (k, _):
        each(k)
        values, at = loaded(code, panel, k), builder.mul(k, next_step)
        for start, pair in zip(starts, totals, strict=True):
            weight = code.splat(code.load(builder.add(start, at), code.element, code.size))
            for value, total in zip(values, pair, strict=True):
                builder.store(code.fma(weight, value, builder.load(total)), total)
    for row, pair in zip(rows, totals, strict=True):
        before = _unless(code, fresh, loaded(code, out, row), code.constant(0))
        store(code, [builder.fadd(builder.load(total), old) for total, old in zip(pair, before, strict=True)], out, row)


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
    totals = kept(code, [code.constant(0)] * 2)
    with cgutils.for_range_slice(builder, _I64(0), count, one) as (i, _):
        for value, total in zip(loaded(code, x, i), totals, strict=True):
            builder.store(code.fma(value, value, builder.load(total)), total)
    eps = code.splat(code.load(eps_at, code.element, code.size))
    number = code.splat(builder.sitofp(count, code.element))
    means = [builder.fadd(builder.fdiv(builder.load(total), number), eps) for total in totals]
    scales = [builder.fdiv(code.constant(1), code.sqrt(mean)) for mean in means]
    with cgutils.for_range_slice(builder, _I64(0), count, one) as (i, _):
        at = builder.add(weights, builder.mul(i, _I64(code.size)))
        weight = code.splat(code.load(at, code.element, code.size))
        normed = [builder.fmul(value, scale) for value, scale in zip(loaded(code, x, i), scales, strict=True)]
        store(code, [builder.fmul(value, weight) for value in normed], out, i)


@intrinsic
def norm(typingctx, dtype, kind, x, weights, eps_at, out, count):  # type: ignore[no-untyped-def]
    """Each token's RMS norm over its features x [count, lanes], times the weights [count]."""
    return signature((dtype, kind), 5), generator(_write_norm)


def scaled(code: Code, scale_at: Any) -> Any:
    """The scale of scores whose weights are powers of two."""
    scale = code.splat(code.load(scale_at, code.element, code.size))
    return code.builder.fmul(scale, code.constant(LOG2E))


def weights_of(code: Code, found: list[Any], scale: Any, best: list[Any]) -> list[Any]:
    """Powers of two of scale * (score - best), of pairs of vectors."""
    limits = [code.builder.fneg(code.builder.fmul(top, scale)) for top in best]
    return [code.exp2(code.fma(score, scale, limit)) for score, limit in zip(found, limits, strict=True)]


def _each_score(
    code: Code, scores: Any, count: Any, hidden: Any, each: Callable[[Any, list[Any], Callable[..., Any]], None]
) -> None:
    """each(t, its scores, what puts another value where a lane does not see it): mostly every lane does."""
    builder, one = code.builder, _I64(1)
    some = builder.icmp_signed(">", builder.add(hidden, count), one)
    with builder.if_else(some) as branches:
        for branch, blind in zip(branches, (True, False), strict=True):
            with branch, cgutils.for_range_slice(builder, _I64(0), count, one) as (t, _):
                first = builder.add(hidden, t)
                put = partial(seen, code, first) if blind else lambda values, instead: values
                each(t, loaded(code, scores, t), put)


def _write_compare(code: Code, kind: Any, args: list[Any]) -> None:
    builder, one = code.builder, _I64(1)
    scores, count, hidden, scale_at, state, head_dim, fresh = args
    total_row, lowest, nothing = builder.add(head_dim, one), code.constant(_LOWEST_SCORE), code.constant(0)
    scale = scaled(code, scale_at)
    before = _unless(code, fresh, loaded(code, state, head_dim), lowest)
    tops = kept(code, before)

    def compare_one(t: Any, found: list[Any], put: Callable[..., Any]) -> None:
        for score, top in zip(put(found, lowest), tops, strict=True):
            builder.store(code.greater(score, builder.load(top)), top)

    _each_score(code, scores, count, hidden, compare_one)
    best = [builder.load(top) for top in tops]
    limits = [(builder.fmul(old, scale), builder.fmul(new, scale)) for old, new in zip(before, best, strict=True)]
    factors = [code.exp2(builder.fsub(old, new)) for old, new in limits]
    totals = _unless(code, fresh, loaded(code, state, total_row), nothing)
    same = builder.and_(*[_all_one(code, factor) for factor in factors])
    rows = builder.select(builder.or_(same, builder.icmp_signed("!=", fresh, _I64(0))), _I64(0), head_dim)
    with cgutils.for_range_slice(builder, _I64(0), rows, one) as (i, _):
        sums = zip(loaded(code, state, i), factors, strict=True)
        store(code, [builder.fmul(value, factor) for value, factor in sums], state, i)
    store(code, best, state, head_dim)
    store(code, [builder.fmul(old, factor) for old, factor in zip(totals, factors, strict=True)], state, total_row)


def _all_one(code: Code, values: Any) -> Any:
    """Whether all of a vector's elements are 1."""
    mask = ir.IntType(code.lanes)
    equal = code.builder.fcmp_ordered("==", values, code.constant(1))
    return code.builder.icmp_signed("==", code.builder.bitcast(equal, mask), ir.Constant(mask, -1))


@intrinsic
def compare(  # type: ignore[no-untyped-def]
    typingctx, dtype, kind, scores, count, hidden, scale_at, state, head_dim, fresh
):
    """Puts the best of what is there and of scores [count, lanes] into state [head_dim + 2, lanes]: sums, best, total.

    Of token t the first `hidden + t` lanes see nothing. Sums and total so far are multiplied by what makes them
    relative to the new best; fresh: nothing was so far, and the sums are undefined.
    """
    return signature((dtype, kind), 7), generator(_write_compare)


def _write_weigh(code: Code, kind: Any, args: list[Any]) -> None:
    builder = code.builder
    scores, count, hidden, scale_at, state, head_dim = args
    total_row, nothing, scale = builder.add(head_dim, _I64(1)), code.constant(0), scaled(code, scale_at)
    best, totals = loaded(code, state, head_dim), kept(code, loaded(code, state, total_row))

    def weigh_one(t: Any, found: list[Any], put: Callable[..., Any]) -> None:
        weights = put(weights_of(code, found, scale, best), nothing)
        store(code, weights, scores, t)
        for weight, total in zip(weights, totals, strict=True):
            builder.store(builder.fadd(builder.load(total), weight), total)

    _each_score(code, scores, count, hidden, weigh_one)
    store(code, [builder.load(total) for total in totals], state, total_row)


@intrinsic
def weigh(typingctx, dtype, kind, scores, count, hidden, scale_at, state, head_dim):  # type: ignore[no-untyped-def]
    """Scores [count, lanes] -> exp(scale * (score - best)), after compare() of the same; adds them to the total."""
    return signature((dtype, kind), 6), generator(_write_weigh)


def seen(code: Code, hidden: Any, values: list[Any], instead: Any) -> list[Any]:
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


panel_1, panel_8 = _panel(1), _panel(8)
