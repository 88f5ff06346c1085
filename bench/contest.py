"""One workload on the four systems, and the figures of their comparison. Knows no particular workload."""

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import mkdtemp

import numpy as np

from bench import figures as f
from bench.figures import Figure, Key
from bench.lab import Measured, bench
from bench.output import Report, curves
from bench.rig import LOCAL, PDD, REMOTE, UNCACHED, Prices, Rig, Sla, System
from kvrelay.load.arrival import Arrival
from kvrelay.load.record import Record
from kvrelay.load.workload import Workload

Load = Callable[[System, int], tuple[Workload, Arrival]]
"""What a system is given under a seed."""
MOST_REPEATS = 2
"""Of one system under one seed, while the machine was too busy for its pace; told. Failed requests are no reason."""


@dataclass(slots=True)
class Result:
    """One system, all seeds."""

    system: System
    runs: dict[int, Measured] = field(default_factory=dict)
    repeated: list[str] = field(default_factory=list)
    """Seed by seed, why a run before the one in `runs` was thrown away."""

    @property
    def by_key(self) -> dict[Key, Record]:
        """Every request; turns of one conversation apart."""
        return {(s, f"{r.conversation}/{r.turn}"): r for s, run in self.runs.items() for r in run.records}

    @property
    def records(self) -> list[Record]:
        """Of whole answers."""
        return [record for run in self.runs.values() for record in run.records if record.ok]

    def problems(self) -> list[str]:
        """Why its figures must not be believed."""
        named = [(seed, run.health.why_not()) for seed, run in self.runs.items()]
        return [f"{self.system.name}, seed {seed}: {why}" for seed, why in named if why]


async def contest(systems: Iterable[System], rig: Rig, seeds: Iterable[int], load: Load) -> dict[str, Result]:
    """Every system in turn, by itself on the machine, with the same seeds; started afresh for each."""
    logs, results = Path(mkdtemp(prefix="kvrelay-bench-")), {}
    for system in systems:
        result = results[system.name] = Result(system)
        for seed in seeds:
            for _ in range(1 + MOST_REPEATS):
                async with bench(system, rig, logs) as running:
                    measured = result.runs[seed] = await running.run(*load(system, seed))
                health = measured.health
                about = f"{len(measured.records)} requests in {measured.wall_s:.0f} s, {health.cores:.2f} cores"
                tell(f"{system.name}, seed {seed}: {about}, {health.overrun_share:.2%} steps overran")
                if not health.too_busy:
                    break
                result.repeated.append(f"{system.name}, seed {seed}: {health.why_not()}")
            else:
                result.repeated.pop()  # the last one is the run that stays, invalid
    return results


def tell(text: str) -> None:
    """Progress."""
    print(text, file=sys.stderr, flush=True)


def compare(results: dict[str, Result], rig: Rig) -> dict[str, Figure]:
    """The figures of pdd against pd-local and pd-remote with the cache, paired by request."""
    runs = {name: results[name].by_key for name in (LOCAL.name, REMOTE.name, PDD.name)}
    keys = f.common_keys(runs)
    ttft, ttst = (f.paired(runs, name, keys) for name in ("ttft_ms", "ttst_ms"))
    low = f.lowest_hits(runs[LOCAL.name], keys)
    low_ttft, low_ttst = (f.paired(runs, name, low) for name in ("ttft_ms", "ttst_ms"))
    local, remote, pdd = LOCAL.name, REMOTE.name, PDD.name
    ours = results[pdd]
    records, wan = ours.records, sum(run.wan_bytes for run in ours.runs.values())
    gap = f.gap_over_bound(runs[pdd], runs[local], rig.bound_ms)
    return {
        "remote_ttft_p50_vs_local": f.ratio(ttft[remote], ttft[local], 50),
        "ttft_p50_vs_local": f.ratio(ttft[pdd], ttft[local], 50, "<= 1.05"),
        "ttft_p90_vs_local": f.ratio(ttft[pdd], ttft[local], 90, "<= 1.05"),
        "ttft_p99_vs_local": f.ratio(ttft[pdd], ttft[local], 99),
        "ttst_p50_vs_local": f.ratio(ttst[pdd], ttst[local], 50),
        "ttst_p90_vs_local": f.ratio(ttst[pdd], ttst[local], 90, "<= 1.05"),
        "ttst_p99_vs_local": f.ratio(ttst[pdd], ttst[local], 99),
        "ttft_p90_cut": f.cut(ttft[pdd], ttft[remote], 90, ">= 0.515"),
        "ttst_p90_cut": f.cut(ttst[pdd], ttst[remote], 90, ">= 0.515"),
        "ttft_lowhit_p50_cut": f.cut(low_ttft[pdd], low_ttft[remote], 50, ">= 0.515"),
        "ttst_lowhit_p50_cut": f.cut(low_ttst[pdd], low_ttst[remote], 50, ">= 0.515"),
        "relay_token_share": Figure(f.relay_share(records), target="<= 0.062"),
        "wan_cut_vs_ideal": Figure(f.wan_cut_vs_ideal(records, wan), target=">= 0.95"),
        "max_gap_over_bound": Figure(gap, target="<= 1"),
        "hit_rate": Figure(f.hit_rate(records)),
    }


def worth(results: dict[str, Result], rig: Rig, sla: Sla, prices: Prices) -> dict[str, Figure]:
    """Goodput under one SLA and BCR of each system."""
    found: dict[str, Figure] = {}
    for name, result in results.items():
        good = float(np.mean([f.goodput(run.records, sla) for run in result.runs.values()]))
        found[f"goodput_{name}"] = Figure(good)
        found[f"bcr_{name}"] = Figure(good / prices.cost(result.system, rig))
    return found


def describe(report: Report, results: dict[str, Result], out: Path) -> None:
    """Adds what each system did: a table, pictures of TTFT and time to second token, its records."""
    rows = []
    for name, result in results.items():
        cells = [name]
        for kind in ("ttft_ms", "ttst_ms", "max_gap_ms"):
            values = [v for r in result.records if (v := getattr(r, kind)) is not None] or [float("nan")]
            cells.append(" / ".join(f"{p:.0f}" for p in np.percentile(values, [50, 90, 99])))
        pipelines = sorted({r.pipeline for r in result.records})
        cells.append(", ".join(f"{sum(r.pipeline == p for r in result.records)} {p}" for p in pipelines))
        runs = result.runs.values()
        busy = sum(run.link_busy_s for run in runs) / max(1e-9, sum(run.wall_s for run in runs))
        cells += [f"{sum(run.wan_bytes for run in runs) / 1e6:.1f} MB, busy {busy:.0%}"]
        overran = sum(run.health.overrun for run in runs) / max(1, sum(run.health.steps for run in runs))
        cells.append(f"{overran:.2%}")
        rows.append(cells)
        report.invalid += result.problems()
        report.repeated += result.repeated
        with (out / f"{report.name}-{name}.jsonl").open("w") as lines:
            lines.writelines(json.dumps({"seed": key[0], **r.line()}) + "\n" for key, r in result.by_key.items())
    columns = ["system", "TTFT ms 50/90/99", "TTST ms", "longest gap ms", "pipelines", "A to B", "overrun"]
    report.tables.append(("systems", columns, rows))
    report.data["health"] = {n: {s: asdict(r.health) for s, r in x.runs.items()} for n, x in results.items()}
    for kind in ("ttft_ms", "ttst_ms"):
        series = {}
        for name, result in results.items():
            values = sorted(v for r in result.records if (v := getattr(r, kind)) is not None)
            series[name] = (values, [(i + 1) / len(values) for i in range(len(values))])
        path = out / f"{report.name}-{kind}.png"
        report.pictures.append(curves(path, series, kind.replace("_", ", "), "share of requests", log=True))


__all__ = ["LOCAL", "PDD", "REMOTE", "UNCACHED", "Load", "Result", "compare", "contest", "describe", "tell", "worth"]
