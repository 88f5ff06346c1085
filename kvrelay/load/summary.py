"""The figures of a run, from its records. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kvrelay.load.record import SOURCES, Record
from kvrelay.load.spread import Spread
from kvrelay.load.worth import Prices, Slo

SHORTEST_S = 1e-6
"""A run that took less has no rates."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What records cannot tell, because only the fleet, the link or the generator knows it."""

    stages: Mapping[str, int] = field(default_factory=dict)
    """By role."""
    kv_bytes_per_token: float = 0.0
    """Of main decode's layout; 0: not known."""
    link_bytes_per_s: float = 0.0
    """The WAN's rate, A to B; 0: not known, or unlimited."""
    link_bytes: int = 0
    """That crossed from A to B during the run, all in; 0: not known."""
    cut_transfers: int = 0
    """Transfers to main decode that the singular rule cut during the run."""
    cpu_share: float = 0.0
    """Of one core, that the busiest generator process used."""
    pace: str = ""
    steps_overrun: int = 0
    """Paced steps that overran during the run."""
    steps: int = 0


@dataclass(frozen=True, slots=True)
class Summary:
    """Times are of whole answers that were read without pauses; requests of the warm-up count nowhere."""

    requests: int
    ok: int
    failed: int
    cancelled: int
    unfinished: int
    wrong: int
    """That differ from the reference."""
    checked: int
    wall_s: float
    requests_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    times_ms: dict[str, Spread]
    """TTFT, TTST, ITL, "ITL relay", "ITL hand-off", "ITL main", TPOT, E2EL, "hand-off stall", "longest gap", "client
    queue"; missing where nothing was measured."""
    goodput_per_s: float | None
    """None: no limits were given."""
    good_share: float | None
    cost: float | None
    bcr: float | None
    """Goodput ÷ cost."""
    tokens: dict[str, int]
    """Output tokens by stage."""
    relay_share: float
    pipelines: dict[str, int]
    reasons: dict[str, int]
    hit_prefill: float
    """Prompt tokens served from P's caches ÷ prompt tokens of the requests that asked P."""
    hit_main: float
    hit_gap: float
    """P's less MD's, over the requests that had both."""
    wan_bytes: int
    """Of KV, as reported by request."""
    saved_bytes: int | None
    """KV that main decode's caches kept from crossing; None: the layout is not known."""
    link_use: float | None
    """Bytes that crossed ÷ what the link could carry in wall_s; None: not known."""
    cut_transfers: int
    fallbacks: dict[str, int]
    errors: dict[str, int]
    failed_legs: dict[str, int]
    manners: dict[str, int]
    cpu_share: float
    pace: str
    steps_overrun: int
    steps: int

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def summarise(
    records: Sequence[Record],
    wall_s: float | None = None,
    *,
    slo: Slo | None = None,
    prices: Prices | None = None,
    around: Surroundings | None = None,
) -> Summary:
    """Figures of a run. wall_s: since the warm-up's end; None: from the first request's due time to the last end."""
    around = around or Surroundings()
    counted = [record for record in records if not record.warm_up]
    whole = [record for record in counted if record.ok]
    wall_s = _wall_s(counted) if wall_s is None else wall_s
    per_s = 1 / wall_s if wall_s >= SHORTEST_S else 0.0
    outcomes = Counter(record.outcome for record in counted)
    kept = sum(slo.kept_by(record) for record in counted) if slo else None
    cost = prices.of_fleet(around.stages) if prices else None
    goodput = None if kept is None else kept * per_s
    both = [record for record in whole if record.prefill and record.main]
    tokens = {source: sum(record.tokens(source) for record in whole) for source in SOURCES.values()}
    saved = round(sum(r.cached_main_tokens for r in whole) * around.kv_bytes_per_token)
    return Summary(
        requests=len(counted),
        ok=outcomes["ok"],
        failed=outcomes["failed"],
        cancelled=outcomes["cancelled"],
        unfinished=outcomes["unfinished"],
        wrong=sum(record.matches is False for record in counted),
        checked=sum(record.matches is not None for record in counted),
        wall_s=wall_s,
        requests_per_s=len(whole) * per_s,
        prompt_tokens_per_s=sum(r.prompt_tokens for r in whole) * per_s,
        output_tokens_per_s=sum(r.output_tokens for r in whole) * per_s,
        times_ms=times_of(counted),
        goodput_per_s=goodput,
        good_share=None if kept is None else kept / max(1, len(counted)),
        cost=cost,
        bcr=goodput / cost if goodput is not None and cost else None,
        tokens={source: count for source, count in tokens.items() if count or source != "server"},
        relay_share=tokens["relay"] / (sum(tokens.values()) or 1),
        pipelines=_counts(record.pipeline for record in whole if record.pipeline),
        reasons=_counts(f"{record.pipeline}: {record.reason}" for record in whole if record.pipeline),
        hit_prefill=hit_rate((r for r in whole if r.prefill), "prefill"),
        hit_main=hit_rate((r for r in whole if r.main or not r.pipeline), "main"),
        hit_gap=hit_rate(both, "prefill") - hit_rate(both, "main"),
        wan_bytes=sum(record.wan_bytes for record in whole),
        saved_bytes=saved if around.kv_bytes_per_token else None,
        link_use=around.link_bytes * per_s / around.link_bytes_per_s if around.link_bytes_per_s else None,
        cut_transfers=around.cut_transfers,
        fallbacks=_counts(reason for record in whole for reason in record.fallbacks),
        errors=_counts(record.error for record in counted if record.error),
        failed_legs=_counts(record.failed_leg or "none named" for record in counted if record.outcome == "failed"),
        manners=_counts(record.manner for record in counted if record.manner),
        cpu_share=around.cpu_share,
        pace=around.pace,
        steps_overrun=around.steps_overrun,
        steps=around.steps,
    )


def times_of(records: Iterable[Record]) -> dict[str, Spread]:
    """Every kind of time, ms, over the counted ones; the client's queue over all."""
    records = list(records)
    good = [record for record in records if record.counted]
    by_source = [record.itl_by_source for record in good]
    times = {
        "TTFT": Spread.of(r.ttft_ms for r in good),
        "TTST": Spread.of(r.ttst_ms for r in good),
        "ITL": Spread.of(gap for r in good for gap in r.itl_ms),
        "ITL relay": Spread.of(gap for gaps in by_source for gap in gaps.get("relay", ())),
        "ITL hand-off": Spread.of(gap for gaps in by_source for gap in gaps.get("handoff", ())),
        "ITL main": Spread.of(gap for gaps in by_source for gap in gaps.get("main", ())),
        "TPOT": Spread.of(r.tpot_ms for r in good),
        "E2EL": Spread.of(r.e2el_ms for r in good),
        "hand-off stall": Spread.of(r.handoff_stall_ms for r in good),
        "longest gap": Spread.of(r.max_gap_ms for r in good if r.output_tokens > 1),
        "client queue": Spread.of(r.queue_ms for r in records),
    }
    return {name: spread for name, spread in times.items() if spread is not None}


def hit_rate(records: Iterable[Record], where: str) -> float:
    """Token-weighted, at "prefill" or "main"; 0 without records."""
    records = list(records)
    cached = sum(r.cached_prefill_tokens if where == "prefill" else r.cached_main_tokens for r in records)
    return cached / (sum(record.prompt_tokens for record in records) or 1)


def _wall_s(records: Sequence[Record]) -> float:
    if not records:
        return 0.0
    return max(r.sent_s + r.e2el_ms / 1e3 for r in records) - min(r.due_s for r in records)


def _counts(names: Iterable[str]) -> dict[str, int]:
    return dict(Counter(names).most_common())
