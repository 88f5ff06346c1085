"""A softmax's weights, written as parts for AMX tiles beside products of other tokens. Knows no sequence.

Products in tiles keep the units for vectors idle, and the other way round, so both are written into one loop.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

from kvrelay.model.kernels.amx import STEP_BYTES, TILE_BYTES, multiplied, parts_of
from kvrelay.model.kernels.lanes import kept, loaded, scaled, seen, store, weights_of
from kvrelay.model.kernels.vectors import VECTOR_BYTES, Code, generator, signature

PAIRS_BESIDE = 4
"""Pairs of tokens that are weighed beside one step of a product: even, as a step is two half-steps."""
_ROWS = 16
_I64 = ir.IntType(64)


class _Weigher:
    """Writes what weighs pairs of tokens: pair i of a step of 32 is tokens i and i + 16."""

    def __init__(
        self, code: Code, scores: Any, hidden: Any, scale_at: Any, state: Any, head_dim: Any, out: Any
    ) -> None:
        self._code, self._scores, self._hidden, self._out, self._state = code, scores, hidden, out, state
        self._scale, self._best = scaled(code, scale_at), loaded(code, state, head_dim)
        self._total_row = code.builder.add(head_dim, _I64(1))
        self._totals = kept(code, loaded(code, state, self._total_row))

    def weigh(self, pair: Any) -> None:
        """Its weights, as parts, and added to the total."""
        code, builder = self._code, self._code.builder
        step, row = builder.lshr(pair, _I64(4)), builder.and_(pair, _I64(15))
        token, weights = builder.add(builder.shl(step, _I64(5)), row), []
        for n in range(2):
            at = builder.add(token, _I64(n * _ROWS))
            found = weights_of(code, loaded(code, self._scores, at), self._scale, self._best)
            weights.append(seen(code, builder.add(self._hidden, at), found, code.constant(0)))
            for weight, total in zip(weights[-1], self._totals, strict=True):
                builder.store(builder.fadd(builder.load(total), weight), total)
        place = builder.add(builder.mul(step, _I64(STEP_BYTES)), builder.mul(row, _I64(VECTOR_BYTES)))
        for half in range(2):
            for part, value in enumerate(parts_of(code, weights[0][half], weights[1][half])):
                code.store(value, builder.add(builder.add(self._out, place), _I64((2 * part + half) * TILE_BYTES)))

    def end(self) -> None:
        """Once, after all."""
        store(self._code, [self._code.builder.load(total) for total in self._totals], self._state, self._total_row)


def _write_weigh(code: Code, kind: Any, args: list[Any]) -> None:
    weigher = _Weigher(code, *args[:6])
    with cgutils.for_range_slice(code.builder, args[6], args[7], _I64(1)) as (pair, _):
        weigher.weigh(pair)
    weigher.end()


@intrinsic
def weigh_pairs(  # type: ignore[no-untyped-def]
    typingctx, dtype, kind, scores, hidden, scale_at, state, head_dim, out, begin, end
):
    """Parts of the weights of pairs begin .. end of scores [TILED, lanes] a step, after lanes.compare() of the same."""
    return signature((dtype, kind), 8), generator(_write_weigh)


def _write_multiply(code: Code, kind: Any, args: list[Any]) -> None:
    builder = code.builder
    weigher, (begin, end) = _Weigher(code, *args[5:11]), args[11:]

    def beside(n: int) -> Callable[[Any], None]:
        def weigh(t: Any) -> None:
            pair = builder.add(begin, builder.add(builder.mul(t, _I64(PAIRS_BESIDE // 2)), _I64(n)))
            with builder.if_then(builder.icmp_signed("<", pair, end)):
                weigher.weigh(pair)

        return weigh

    multiplied(code, *args[:5], *[beside(n) for n in range(PAIRS_BESIDE // 2)])
    weigher.end()


@intrinsic
def multiply_weighing(  # type: ignore[no-untyped-def]
    typingctx,
    dtype,
    kind,
    weights,
    values,
    steps,
    out,
    fresh,
    scores,
    hidden,
    scale_at,
    state,
    head_dim,
    parts,
    begin,
    end,
):
    """amx.multiplied(), and beside it weigh_pairs(): up to steps * PAIRS_BESIDE pairs of begin .. end."""
    return signature((dtype, kind), 13), generator(_write_multiply)
