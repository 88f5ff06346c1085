"""`python -m bench.paper`: the paper's comparison, scaled to this host. One workload, four systems, one run."""

import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import uvloop

from bench.contest import LOCAL, PDD, REMOTE, Result, compare, contest, describe, tell, worth
from bench.figures import RESAMPLED
from bench.lab import VOCAB_SIZE
from bench.output import Report, arguments, curves
from bench.rig import SYSTEMS, Prices, Rig, Sla, System
from kvrelay.load.arrival import Arrival, Poisson
from kvrelay.load.hits import HitRates, SharedPrefixes
from kvrelay.load.lengths import Lengths
from kvrelay.load.workload import Workload


@dataclass(frozen=True, slots=True)
class Plan:
    """Declared before the run."""

    requests: int = 75
    """Of each seed; the uncached system answers the first of them, at the rate it can carry."""
    seeds: int = 3
    rate_per_s: float = 1.2
    hits: str = "0.99:75,0.8:13,0.45:12"
    """Mean 90 %; three quarters hit more than 95 %."""
    prompt: Lengths = Lengths(1536, 2560)
    output: Lengths = Lengths(96, 128)

    @property
    def scale(self) -> str:
        """Against the paper's 64K tokens of prompt and 1K of output."""
        prompt, output = ((x.low + x.high) / 2 for x in (self.prompt, self.output))
        return f"prompts 1/{65536 / prompt:.0f} of 64K, answers 1/{1024 / output:.0f} of 1K"

    def load(self, system: System, seed: int) -> tuple[Workload, Arrival]:
        """The same conversations in the same order; arrivals stretched where a system cannot carry the rate."""
        count = max(8, round(self.requests * system.rate_share))
        hits = HitRates.parse(self.hits)
        workload = SharedPrefixes(seed, VOCAB_SIZE, count, hits, self.prompt, self.output)
        return workload, Poisson(self.rate_per_s * system.rate_share, seed)


QUICK = Plan(requests=24, seeds=1)


async def paper(plan: Plan, rig: Rig, out: Path, *, quick: bool) -> Report:
    """The four systems at one point."""
    sla, prices = Sla(), Prices()
    report = _declared("paper", plan, rig, {"sla": asdict(sla), "prices": asdict(prices)}, quick=quick)
    results = await contest(SYSTEMS, rig, range(1, plan.seeds + 1), plan.load)
    report.figures = compare(results, rig) | worth(results, rig, sla, prices)
    describe(report, results, out)
    return report


def _declared(name: str, plan: Plan, rig: Rig, more: dict[str, object], *, quick: bool) -> Report:
    settings = {"scale": plan.scale, **asdict(plan), **asdict(rig), **more}
    report = Report(name, quick, settings, interval=RESAMPLED)
    tell(f"{report.emulated}\nscale: {plan.scale}; {settings}")
    return report


async def sweep(plan: Plan, rig: Rig, out: Path, *, quick: bool) -> Report:
    """P90 of TTFT and time to second token around the chosen point, so that nobody has to believe that one."""
    few = replace(plan, requests=12 if quick else 30, seeds=1)
    report = _declared("paper-sweep", few, rig, {}, quick=quick)
    report.module = "paper"
    rates = [rig.wan_rate_bytes_per_s * x for x in ((0.5, 2) if quick else (0.5, 1, 2))]
    await _axis(report, "WAN rate, KB/s", [(r / 1e3, few, replace(rig, wan_rate_bytes_per_s=r)) for r in rates], out)
    hits = [0.65, 0.95] if quick else [0.65, 0.8, 0.95]
    await _axis(report, "hit rate of every prompt", [(h, replace(few, hits=f"{h}"), rig) for h in hits], out)
    outputs = [32, 192] if quick else [24, 96, 192]
    await _axis(report, "output tokens", [(float(n), replace(few, output=Lengths(n, n)), rig) for n in outputs], out)
    return report


async def _axis(report: Report, axis: str, points: list[tuple[float, Plan, Rig]], out: Path) -> None:
    found: list[tuple[float, dict[str, Result]]] = []
    for x, plan, rig in points:
        tell(f"sweep, {axis} {x:g}")
        found.append((x, await contest((LOCAL, REMOTE, PDD), rig, (1,), plan.load)))
    for x, results in found:
        for one in results.values():
            report.invalid += [f"{axis} {x:g}: {problem}" for problem in one.problems()]
            report.repeated += [f"{axis} {x:g}: {run}" for run in one.repeated]
    xs = [x for x, _ in found]
    for kind in ("ttft_ms", "ttst_ms"):
        series = {name: (xs, [_p90(r[name], kind) for _, r in found]) for name in found[0][1]}
        path = out / f"paper-sweep-{axis.split(',')[0].replace(' ', '-')}-{kind}.png"
        report.pictures.append(curves(path, series, axis, f"{kind.split('_')[0].upper()} P90, ms"))
        report.data.setdefault("sweep", {}).setdefault(axis, {})[kind] = series


def _p90(result: Result, kind: str) -> float:
    return float(np.percentile([getattr(r, kind) for r in result.records if getattr(r, kind) is not None], 90))


async def calibrate(plan: Plan, rig: Rig, rates: list[float]) -> None:
    """pd-remote's TTFT P50 ÷ pd-local's at each WAN rate, for a person who then freezes one in rig.py."""
    local = (await contest((LOCAL,), rig, (1,), plan.load))[LOCAL.name]
    for rate in rates:
        remote = (await contest((REMOTE,), replace(rig, wan_rate_bytes_per_s=rate), (1,), plan.load))[REMOTE.name]
        p50 = [float(np.median([r.ttft_ms or 0.0 for r in x.records])) for x in (local, remote)]
        print(f"{rate:,.0f} bytes/s: {p50[1]:.0f} / {p50[0]:.0f} ms = {p50[1] / p50[0]:.2f}")


def main() -> None:
    """Exit code 1: the run is invalid."""
    parser = arguments(__doc__)
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--requests", type=int)
    parser.add_argument("--sweep", action="store_true", help="around the chosen point, instead of it")
    parser.add_argument("--calibrate", type=float, nargs="+", metavar="BYTES_PER_S")
    wanted = parser.parse_args()
    plan = QUICK if wanted.quick else Plan()
    plan = replace(plan, seeds=wanted.seeds or plan.seeds, requests=wanted.requests or plan.requests)
    wanted.out.mkdir(parents=True, exist_ok=True)
    if wanted.calibrate:
        return uvloop.run(calibrate(plan, Rig(), wanted.calibrate))
    experiment = sweep if wanted.sweep else paper
    report = uvloop.run(experiment(plan, Rig(), wanted.out, quick=wanted.quick))
    sys.exit(report.finish(wanted.out))


if __name__ == "__main__":
    main()
