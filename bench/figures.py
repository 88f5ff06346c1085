"""Figures from records: percentiles, pairing by request, bootstrap intervals. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bench.rig import BLOCK_TOKENS, TOKEN_BYTES, Sla
from kvrelay.load.record import Record

Key = tuple[int, str]
"""(seed, conversation): the same request on every system."""
Values = np.ndarray
DRAWS = 2000
RESAMPLED = "95 % of resamples"


@dataclass(frozen=True, slots=True)
class Figure:
    """One number, what it should be, and how sure it is."""

    value: float
    low: float | None = None
    """Of an interval; Report.interval or its bench says of what kind. None: not known."""
    high: float | None = None
    target: str = ""
    """ "<= 1.05", ">= 0.515"; empty: reported only."""

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None: there is none, or the value is not known."""
        if not self.target or np.isnan(self.value):
            return None
        sign, bound = self.target.split()
        return self.value <= float(bound) if sign == "<=" else self.value >= float(bound)

    def json(self) -> dict[str, float | str | bool | None]:
        """As it is written."""
        value = None if np.isnan(self.value) else self.value
        return {"value": value, "low": self.low, "high": self.high, "target": self.target, "met": self.met}


def cells(figure: Mapping[str, float | str | bool | None]) -> list[str]:
    """Value, interval, target and verdict of Figure.json(), for people."""
    value, low, high, met = (figure[name] for name in ("value", "low", "high", "met"))
    sure = "" if low is None or high is None else f"{low:.3f} .. {high:.3f}"
    if value is None:
        return ["", "", str(figure["target"]), "not measured"]
    return [f"{value:.4g}", sure, str(figure["target"]), {None: "", True: "met", False: "missed"}[met]]


def paired(runs: Mapping[str, Mapping[Key, Record]], name: str, keys: Sequence[Key]) -> dict[str, Values]:
    """One kind of time of the same requests on each system, in one order."""
    return {system: np.array([getattr(runs[system][key], name) for key in keys], float) for system in runs}


def common_keys(runs: Mapping[str, Mapping[Key, Record]]) -> list[Key]:
    """Requests that every one of these systems has answered with two tokens or more."""
    keys = set.intersection(*(set(run) for run in runs.values()))
    return sorted(key for key in keys if all(run[key].ok and run[key].ttst_ms is not None for run in runs.values()))


def ratio(above: Values, below: Values, percent: float, target: str = "") -> Figure:
    """P(above) / P(below), resampled by request: a draw takes the same requests of both."""
    return _resampled(above, below, lambda a, b: a / b, percent, target)


def cut(ours: Values, theirs: Values, percent: float, target: str = "") -> Figure:
    """1 - P(ours) / P(theirs), resampled by request."""
    return _resampled(ours, theirs, lambda a, b: 1 - a / b, percent, target)


def _resampled(
    one: Values, other: Values, formula: Callable[[Values, Values], Values], percent: float, target: str
) -> Figure:
    if not len(one):
        return Figure(float("nan"), target=target)
    value = formula(np.percentile(one, percent), np.percentile(other, percent))
    draws = np.random.default_rng(0).integers(0, len(one), (DRAWS, len(one)))
    many = formula(np.percentile(one[draws], percent, axis=1), np.percentile(other[draws], percent, axis=1))
    low, high = np.percentile(many, [2.5, 97.5])
    return Figure(float(value), float(low), float(high), target)


def lowest_hits(run: Mapping[Key, Record], keys: Sequence[Key]) -> list[Key]:
    """The quarter of the requests with the lowest hits, as measured at P."""
    return sorted(keys, key=lambda key: run[key].hit_prefill)[: max(1, len(keys) // 4)]


def relay_share(records: Sequence[Record]) -> float:
    """Output tokens by RLD ÷ all."""
    return sum(r.tokens("relay") for r in records) / max(1, sum(r.output_tokens for r in records))


def wan_cut_vs_ideal(records: Sequence[Record], wan_bytes: int) -> float:
    """Bytes saved by the cache ÷ what the achieved token-weighted hit rate allows; `wan_bytes`: all that crossed."""
    whole = sum(r.prompt_tokens // BLOCK_TOKENS * BLOCK_TOKENS for r in records) * TOKEN_BYTES
    ideal = sum(max(r.cached_prefill_tokens, r.cached_main_tokens) for r in records) * TOKEN_BYTES
    return (whole - wan_bytes) / ideal if ideal else float("nan")


def hit_rate(records: Sequence[Record]) -> float:
    """Token-weighted, at the stage that prefilled."""
    hits = sum(max(r.cached_prefill_tokens, r.cached_main_tokens) for r in records)
    return hits / max(1, sum(r.prompt_tokens for r in records))


def within(record: Record, sla: Sla) -> bool:
    """A good answer."""
    times = (record.ttft_ms, record.ttst_ms, record.tpot_ms)
    limits = (sla.ttft_ms, sla.ttst_ms, sla.tpot_ms)
    return record.ok and all(time is not None and time <= most for time, most in zip(times, limits, strict=True))


def goodput(records: Sequence[Record], sla: Sla) -> float:
    """Good answers a second of the span in which requests came."""
    span_s = max((r.due_s for r in records), default=0.0)
    return sum(within(r, sla) for r in records) / span_s if span_s else 0.0


def gap_over_bound(pdd: Mapping[Key, Record], local: Mapping[Key, Record], bound_ms: float) -> float:
    """P90 of the relayed requests' longest gaps, less pd-local's, ÷ (round trip + 3 steps). 0: nothing was relayed."""
    relayed = [key for key, r in pdd.items() if r.ok and r.tokens("relay") and key in local]
    if not relayed:
        return 0.0
    ours, theirs = (np.percentile([run[key].max_gap_ms for key in relayed], 90) for run in (pdd, local))
    return float((ours - theirs) / bound_ms)
