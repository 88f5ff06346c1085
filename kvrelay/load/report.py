"""What a load run showed: figures from records, a table, JSON lines. Pure but for the one file it writes."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Group
from rich.table import Table

from kvrelay.load.run import Record


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and percentiles of one kind of time, ms."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> "Spread | None":
        """Of the values that are not None; None if there are none. Percentiles are interpolated linearly."""
        known = [value for value in values if value is not None]
        if not known:
            return None
        p50, p90, p99 = (float(p) for p in np.percentile(known, [50, 90, 99]))
        return cls(float(np.mean(known)), p50, p90, p99)


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of a run; times of whole answers only."""

    requests: int
    failed: int
    wall_s: float
    requests_per_s: float
    output_tokens_per_s: float
    times_ms: dict[str, Spread]
    """TTFT, TTST, ITL, TPOT, E2EL; missing where nothing was measured."""
    pipelines: dict[str, int]
    reasons: dict[str, int]
    tokens: dict[str, int]
    """Output tokens by stage: prefill, relay, main."""
    hit_prefill: float
    """Prompt tokens served from P's caches ÷ prompt tokens."""
    hit_main: float
    wan_bytes: int
    fallbacks: dict[str, int]
    errors: dict[str, int]


def summarize(records: Sequence[Record], wall_s: float) -> Summary:
    """Figures of a run that took wall_s."""
    good = [record for record in records if record.ok]
    times = {
        "TTFT": Spread.of(r.ttft_ms for r in good),
        "TTST": Spread.of(r.ttst_ms for r in good),
        "ITL": Spread.of(gap for r in good for gap in r.itl_ms),
        "TPOT": Spread.of(r.tpot_ms for r in good),
        "E2EL": Spread.of(r.e2el_ms for r in good),
    }
    prompt_tokens = sum(r.prompt_tokens for r in good) or 1
    per_s = 1 / wall_s if wall_s else 0.0
    return Summary(
        requests=len(records),
        failed=len(records) - len(good),
        wall_s=wall_s,
        requests_per_s=len(good) * per_s,
        output_tokens_per_s=sum(r.output_tokens for r in good) * per_s,
        times_ms={name: spread for name, spread in times.items() if spread is not None},
        pipelines=dict(Counter(r.pipeline for r in good).most_common()),
        reasons=dict(Counter(f"{r.pipeline}: {r.reason}" for r in good).most_common()),
        tokens={source: sum(getattr(r, f"tokens_{source}") for r in good) for source in ("prefill", "relay", "main")},
        hit_prefill=sum(r.hit_prefill * r.prompt_tokens for r in good) / prompt_tokens,
        hit_main=sum(r.hit_main * r.prompt_tokens for r in good) / prompt_tokens,
        wan_bytes=sum(r.wan_bytes for r in good),
        fallbacks=dict(Counter(reason for r in good for reason in r.fallbacks).most_common()),
        errors=dict(Counter(r.error for r in records if not r.ok).most_common()),
    )


def render(summary: Summary) -> Group:
    """Tables for a terminal."""
    times = Table("ms", "mean", "p50", "p90", "p99", title="at the client")
    for name, spread in summary.times_ms.items():
        times.add_row(name, *(f"{value:,.1f}" for value in (spread.mean, spread.p50, spread.p90, spread.p99)))
    for column in times.columns[1:]:
        column.justify = "right"
    facts = Table(show_header=False, box=None)
    for name, value in fact_lines(summary):
        facts.add_row(name, value)
    return Group(times, facts)


def fact_lines(summary: Summary) -> list[tuple[str, str]]:
    """(name, value) of everything that is not a time."""
    tokens = sum(summary.tokens.values()) or 1
    shares = ", ".join(f"{source} {count} ({count / tokens:.1%})" for source, count in summary.tokens.items())
    lines = [
        ("requests", f"{summary.requests}, failed {summary.failed}, in {summary.wall_s:.1f} s"),
        ("throughput", f"{summary.requests_per_s:.2f} requests/s, {summary.output_tokens_per_s:.1f} output tokens/s"),
        ("tokens by stage", shares),
        ("prompt hits", f"P {summary.hit_prefill:.1%}, MD {summary.hit_main:.1%}"),
        ("KV over the WAN", f"{summary.wan_bytes / 1e6:.1f} MB"),
    ]
    for title, counts in (("pipelines", summary.reasons), ("fallbacks", summary.fallbacks), ("errors", summary.errors)):
        lines += [(title if i == 0 else "", f"{n} × {name}") for i, (name, n) in enumerate(counts.items())]
    return lines


def write_jsonl(records: Iterable[Record], path: Path) -> None:
    """One record a line, in order of their ends."""
    with path.open("w") as file:
        for record in records:
            file.write(json.dumps(asdict(record)) + "\n")
