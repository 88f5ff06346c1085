"""`python -m bench.trace [TRACE.jsonl]`: a Mooncake trace, scaled in time and length, on the four systems."""

import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import uvloop

from bench.contest import compare, contest, describe, worth
from bench.figures import RESAMPLED, Figure
from bench.lab import VOCAB_SIZE
from bench.output import Report, arguments
from bench.rig import SYSTEMS, Prices, Rig, Sla, System
from kvrelay.load.arrival import Arrival, TraceTimes
from kvrelay.load.traces.mooncake import BLOCK_TOKENS
from kvrelay.load.traces.replay import Cut, Replay, TraceFormat, load_rows
from kvrelay.load.traces.row import Row
from kvrelay.load.workload import Workload

MOST_TOKENS = 3900
"""Prompt + output that the tiny model can hold; rows that need more at this scale are left out, and counted."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Declared before the run."""

    trace_s: float = 1200.0
    """Of the trace: 20 minutes."""
    length_scale: float = 1 / 32
    time_scale: float = 0.1
    every: int = 20
    """One of so many conversations is kept, whole, so that this host carries the rate: hits stay what they are."""
    limit: int | None = None


QUICK = Plan(trace_s=60.0, time_scale=0.5, every=5, limit=40)


def kept(rows: list[Row], every: int) -> list[Row]:
    """One of `every` conversations. Rows with one second block are one (the first is what many share)."""
    order: dict[int, int] = {}
    for row in rows:
        order.setdefault(_conversation(row), len(order))
    return [row for row in rows if order[_conversation(row)] % every == 0]


def _conversation(row: Row) -> int:
    return row.hash_ids[1] if len(row.hash_ids) > 1 else -1 - row.line


def synthetic(path: Path, rows: int, seed: int = 1) -> None:
    """A trace in Mooncake's format: conversations whose prompts grow, arriving in bursts every 3 s."""
    chance, blocks = np.random.default_rng(seed), 1
    talks: list[list[int]] = []
    with path.open("w") as lines:
        for number in range(rows):
            if talks and chance.random() < 0.6:
                talk = talks[int(chance.integers(len(talks)))]
            else:
                talk = [0]
                talks.append(talk)
            for _ in range(int(chance.integers(1, 20))):
                talk.append(blocks)
                blocks += 1
            length = len(talk) * BLOCK_TOKENS - int(chance.integers(BLOCK_TOKENS))
            row = {
                "timestamp": number // 3 * 1000,
                "input_length": length,
                "output_length": int(chance.integers(50, 900)),
            }
            lines.write(json.dumps(row | {"hash_ids": talk}) + "\n")
            if len(talk) > 180:
                talks.remove(talk)


async def trace(path: Path, plan: Plan, rig: Rig, out: Path, *, quick: bool, name: str) -> Report:
    """All of it."""
    cut = Cut(
        end_s=plan.trace_s,
        time_scale=plan.time_scale,
        length_scale=plan.length_scale,
        most_tokens=MOST_TOKENS,
    )
    whole, left_out = load_rows(path, TraceFormat.MOONCAKE, cut)
    rows = kept(whole, plan.every)[: plan.limit]

    def load(system: System, seed: int) -> tuple[Workload, Arrival]:
        few = rows[: max(6, round(len(rows) * system.rate_share))]
        slower = [replace(row, at_s=row.at_s / system.rate_share) for row in few]
        return Replay(tuple(slower), cut, seed, VOCAB_SIZE), TraceTimes()

    settings = {"trace": name, **asdict(plan), "rows": len(rows), "left_out_too_long": left_out, **asdict(rig)}
    report = Report("trace", quick, settings, interval=RESAMPLED)
    results = await contest(SYSTEMS, rig, (1,), load)
    # No targets here: they are the paper's, of its own workload.
    found = compare(results, rig) | worth(results, rig, Sla(ttft_ms=800, ttst_ms=900), Prices())
    report.figures = {name: Figure(one.value, one.low, one.high) for name, one in found.items()}
    describe(report, results, out)
    return report


def main() -> None:
    """Exit code 1: the run is invalid."""
    parser = arguments(__doc__)
    parser.add_argument("trace", type=Path, nargs="?", help="Mooncake JSONL; without it a synthetic one is made")
    wanted = parser.parse_args()
    wanted.out.mkdir(parents=True, exist_ok=True)
    plan = QUICK if wanted.quick else Plan()
    with TemporaryDirectory(prefix="kvrelay-trace-") as folder:
        path = wanted.trace or Path(folder) / "synthetic.jsonl"
        if wanted.trace is None:
            synthetic(path, 3 * round(plan.trace_s))
        name = path.name
        report = uvloop.run(trace(path, plan, Rig(), wanted.out, quick=wanted.quick, name=name))
    sys.exit(report.finish(wanted.out))


if __name__ == "__main__":
    main()
