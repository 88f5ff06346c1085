"""`python -m bench.bathtub`: prefill throughput and revenue against hit rate, tails packed or not. Real engine."""

import sys
import time
from dataclasses import asdict, dataclass
from itertools import count

import numpy as np
import torch

from bench.figures import Figure
from bench.output import Report, arguments, curves
from kvrelay.engine.engine import Engine, EngineConfig
from kvrelay.engine.events import CaughtUp, Failed
from kvrelay.engine.sequence import SequenceSpec
from kvrelay.model.weights import load_model
from kvrelay.types import Sampling

NOTHING_EMULATED = "Real engine, one stage in one process: neither pace nor WAN is emulated here."


@dataclass(frozen=True, slots=True)
class Plan:
    """Declared before the run."""

    model: str = "smollm2"
    prompt_tokens: int = 512
    token_budget: int = 256
    requests: int = 8
    """At once, of each point."""
    points: tuple[int, ...] = tuple(range(0, 100, 7))
    """Hit rates, %."""
    repeats: int = 1
    prices: tuple[float, ...] = (0.10, 0.25)
    """Of a cached input token, against an uncached one."""


QUICK = Plan(model="tiny", prompt_tokens=1024, points=(0, 10, 20, 30, 40, 50, 60, 70, 80, 90, 98), repeats=3)


def prefill_s(engine: Engine, prompts: list[list[int]], names: "count[int]") -> float:
    """Seconds until the KV of all these prompts is computed."""
    waiting = set()
    began = time.perf_counter()
    for ids in prompts:
        name = f"s{next(names)}"
        waiting.add(name)
        engine.add(SequenceSpec(name, ids, Sampling(0, 1, ignore_eos=True), sample=False))
    opened = list(waiting)
    while waiting:
        for name, event in engine.step():
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, CaughtUp):
                waiting.discard(name)
    took_s = time.perf_counter() - began
    for name in opened:
        engine.close(name)
    engine.step()
    return took_s


def bathtub(plan: Plan) -> dict[str, list[float]]:
    """Prompt tokens a second at each hit rate, packing "off" and "on"."""
    torch.set_num_threads(1)
    loaded = load_model(plan.model, device="cpu", dtype="", block_tokens=16)
    blocks = (plan.requests + 4) * (plan.prompt_tokens // 16 + 2)
    found: dict[str, list[float]] = {"off": [], "on": []}
    chance, names = np.random.default_rng(1), count()

    def ids(length: int) -> list[int]:
        return [int(i) for i in chance.integers(1, 250, length)]

    engines = {
        name: Engine(
            loaded,
            EngineConfig(blocks, plan.requests + 1, token_budget=plan.token_budget, pack_tails=name == "on"),
        )
        for name in found
    }
    document = ids(plan.prompt_tokens)
    for percent in plan.points:
        shared = document[: plan.prompt_tokens * percent // 100]
        times: dict[str, list[float]] = {name: [] for name in found}
        for _ in range(plan.repeats):
            prompts = [shared + ids(plan.prompt_tokens - len(shared)) for _ in range(plan.requests)]
            for name, engine in engines.items():  # side by side: what disturbs one disturbs the other
                engine.flush_cache()
                if len(shared) >= 16:
                    prefill_s(engine, [[*shared, 1]], names)
                times[name].append(prefill_s(engine, prompts, names))
        for name, took in times.items():
            found[name].append(plan.requests * plan.prompt_tokens / min(took))
    return found


def revenue(tokens_per_s: list[float], points: tuple[int, ...], price: float) -> list[float]:
    """Income a second, in prices of one uncached input token."""
    return [t * (1 - p / 100 + price * p / 100) for t, p in zip(tokens_per_s, points, strict=True)]


def main() -> None:
    """Prints and writes."""
    wanted = arguments(__doc__).parse_args()
    plan = QUICK if wanted.quick else Plan()
    found = bathtub(plan)
    report = Report("bathtub", wanted.quick, asdict(plan), emulated=NOTHING_EMULATED)
    xs = [float(p) for p in plan.points]
    rows = [
        [f"{p} %", f"{off:,.0f}", f"{on:,.0f}", f"{on / off:.2f}"]
        for p, off, on in zip(plan.points, found["off"], found["on"], strict=True)
    ]
    report.tables.append(("prompt tokens a second", ["hit rate", "packing off", "packing on", "gain"], rows))
    gains = np.array(found["on"]) / np.array(found["off"])
    report.figures = {"packing_gain_max": Figure(float(gains.max())), "packing_gain_mean": Figure(float(gains.mean()))}
    report.data = {"hit_percent": xs, "tokens_per_s": found}
    series = {f"packing {name}": (xs, found[name]) for name in found}
    wanted.out.mkdir(parents=True, exist_ok=True)
    title = NOTHING_EMULATED
    report.pictures.append(
        curves(wanted.out / "bathtub-throughput.png", series, "hit rate, %", "prompt tokens/s", title=title)
    )
    earned = {}
    for price in plan.prices:
        for name in found:
            income = revenue(found[name], plan.points, price)
            earned[f"cached at {price:.0%}, packing {name}"] = (xs, income)
            lowest = min(income[1:-1], default=income[0])
            report.figures[f"revenue_bottom_{name}_at_{price:.0%}"] = Figure(lowest / income[0])
    report.pictures.append(
        curves(wanted.out / "bathtub-revenue.png", earned, "hit rate, %", "income, uncached tokens/s", title=title)
    )
    report.data["revenue"] = {name: ys for name, (_, ys) in earned.items()}
    sys.exit(report.finish(wanted.out))


if __name__ == "__main__":
    main()
