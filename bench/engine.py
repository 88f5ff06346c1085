"""`python -m bench.engine`: the engine against its peers and against what the machine can do at most.

Each subject runs in its own process, all with the same weights (float32, or made int8 and Q8_0 of them) and threads, in
turns.
"""

import json
import math
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from bench import engine_peers
from bench.engine_peers import KNOWN, MODEL
from bench.engine_plan import EnginePlan, Measured
from bench.figures import Figure
from bench.output import Report, arguments, curves
from kvrelay.model.config import ModelConfig
from kvrelay.model.gguf import open_gguf_model

QUICK = EnginePlan(steps=8, warm=2, prefill=((512, 1), (2048, 1)), mixed=1, windows=1)
FULL = EnginePlan(windows=4)
TURNS = 2
"""Times that each subject is started; samples of all turns are put together. One takes some six minutes."""
SUBJECT_S = 300.0
"""Longest turn of one subject; a peer that needs more is given up."""
ABOUT = "Nothing is emulated. Ratios of medians; intervals from quartiles (of a limit: its median)."
PAIRS = (
    ("decode_b1_vs_transformers", "transformers", "b1_512", ">= 2.0"),
    ("decode_b1_vs_vllm", "vllm", "b1_512", ">= 1.4"),
    ("decode_b1_vs_llamacpp_f32", "llamacpp", "b1_512", ">= 0.9"),
    ("decode_b8_vs_transformers", "transformers", "b8_512", ">= 2.3"),
    ("decode_b8_vs_llamacpp_f32", "llamacpp", "b8_512", ">= 1.05"),
    ("prefill_512_vs_transformers", "transformers", "512", ">= 1.15"),
    ("prefill_2048_vs_transformers", "transformers", "2048", ">= 1.25"),
    ("prefill_4096_vs_transformers", "transformers", "4096", ">= 1.3"),
    ("prefill_2048_vs_llamacpp_f32", "llamacpp", "2048", ">= 1.6"),
)
"""Figure, peer, shape, target: theirs / ours."""


class Runs:
    """What the subjects have measured so far."""

    def __init__(self) -> None:
        self.measured: dict[str, Measured] = {}
        self.missing: dict[str, str] = {}
        """Subject -> why it could not be measured."""

    def turn(self, subject: str, command: Sequence[str]) -> None:
        """Runs one subject's process and adds its samples."""
        if subject in self.missing:
            return
        print(f"... {subject}", flush=True)
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SUBJECT_S)
        except subprocess.TimeoutExpired:
            self.missing[subject] = f"not done after {SUBJECT_S:.0f} s"
            return
        if done.returncode:
            self.missing[subject] = (done.stderr.strip().splitlines() or ["no message"])[-1]
            return
        one = Measured(**json.loads(done.stdout.strip().splitlines()[-1]))
        known = self.measured.setdefault(subject, Measured(note=one.note))
        for mine, more in (
            (known.decode_ms, one.decode_ms),
            (known.prefill_s, one.prefill_s),
            (known.extra, one.extra),
        ):
            for shape, samples in more.items():
                mine.setdefault(shape, []).extend(samples)

    def times(self, subject: str, shape: str) -> list[float]:
        """Samples in seconds; empty: not measured."""
        found = self.measured.get(subject, Measured())
        return [ms / 1e3 for ms in found.decode_ms.get(shape, [])] or found.prefill_s.get(shape, [])


def spread(samples: Sequence[float]) -> tuple[float, float]:
    """Quartiles."""
    if len(samples) < 2:
        return samples[0], samples[0]
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return low, high


def ratio(above: Sequence[float], below: Sequence[float], target: str = "") -> Figure:
    """Median / median; low and high from the quartiles of both."""
    if not above or not below:
        return Figure(float("nan"), target=target)
    (a_low, a_high), (b_low, b_high) = spread(above), spread(below)
    return Figure(statistics.median(above) / statistics.median(below), a_low / b_high, a_high / b_low, target)


def layer_weights(config: ModelConfig) -> int:
    """Elements of one layer's matrices."""
    attention = config.hidden * config.head_dim * 2 * (config.heads + config.kv_heads)
    return attention + 3 * config.hidden * config.intermediate


def prefill_flop(config: ModelConfig, tokens: int) -> float:
    """Of one prefill: 2 for each weight and token (the head's for one row), and attention's triangle once."""
    attention = 4 * config.heads * config.head_dim * tokens * (tokens + 1) / 2
    return config.layers * (2 * layer_weights(config) * tokens + attention) + 2 * config.hidden * config.vocab_size


def step_bytes(config: ModelConfig, context: int) -> float:
    """Float32 bytes that a decode step must read: all weights once (a tied head is the embedding), and the KV."""
    norms = (2 * config.layers + 1) * config.hidden
    kv = 2 * config.layers * config.kv_heads * config.head_dim * context
    return 4.0 * (config.layers * layer_weights(config) + norms + config.hidden * config.vocab_size + kv)


def figures(runs: Runs, config: ModelConfig) -> dict[str, Figure]:
    """All of them; nan where a subject is missing."""
    found = {
        name: ratio(runs.times(peer, shape), runs.times("kvrelay", shape), target)
        for name, peer, shape, target in PAIRS
    }
    limits = runs.measured.get("limits", Measured()).extra

    def best(kind: str) -> float:
        return max((statistics.median(v) for k, v in limits.items() if k.startswith(kind)), default=float("nan"))

    flops = [prefill_flop(config, 2048) / s for s in runs.times("kvrelay", "2048")]
    found["prefill_2048_vs_gemm"] = ratio(flops, [best("gemm")], ">= 0.75")
    floor_s = step_bytes(config, 512) / best("read")
    found["decode_b1_vs_floor"] = ratio(runs.times("kvrelay", "b1_512"), [floor_s], "<= 1.7")
    found["decode_4096_vs_512"] = ratio(runs.times("kvrelay", "b1_4096"), runs.times("kvrelay", "b1_512"), "<= 1.6")
    extra = runs.measured.get("kvrelay", Measured()).extra
    alone = [
        statistics.median(runs.times("kvrelay", "b1_512")) * 1e3 + chunk for chunk in extra.get("chunk_step_ms", [])
    ]
    found["mixed"] = ratio(extra.get("mixed_step_ms", []), alone, "<= 1.1")
    for name, subject in (("int8", "kvrelay_int8"), ("q8_0", "llamacpp_q8")):
        spoken = runs.measured.get(subject, Measured()).extra.get("perplexity", [])
        found[f"{name}_perplexity_vs_f32"] = ratio(spoken, extra.get("perplexity", []))
    for shape in ("b1_512", "b8_512"):
        narrow = runs.times("kvrelay_int8", shape)
        found[f"int8_{shape}_vs_f32"] = ratio(runs.times("kvrelay", shape), narrow)
        found[f"int8_{shape}_vs_llamacpp_q8"] = ratio(runs.times("llamacpp_q8", shape), narrow)
    found["gemm_gflops"] = Figure(best("gemm") / 1e9)
    found["read_gb_per_s"] = Figure(best("read") / 1e9)
    return found


def table(runs: Runs) -> list[list[str]]:
    """One row a subject and shape."""
    rows = []
    for subject, measured in runs.measured.items():
        for shape, samples in measured.decode_ms.items():
            rows.append([subject, f"decode {shape}", f"{statistics.median(samples):.1f} ms", _range(samples, "ms"), ""])
        for shape, samples in measured.prefill_s.items():
            rate = f"{int(shape) / statistics.median(samples):.0f} tokens/s"
            rows.append(
                [subject, f"prefill {shape}", f"{statistics.median(samples):.2f} s", _range(samples, "s"), rate]
            )
        rows += [[subject, "perplexity", f"{one:.3f}", "", ""] for one in measured.extra.get("perplexity", [])[:1]]
    return rows


def picture(path: Path, runs: Runs) -> str:
    """Prefill rate by prompt length, each subject a line."""
    lines = {}
    for subject, measured in runs.measured.items():
        if measured.prefill_s:
            tokens = [float(shape) for shape in measured.prefill_s]
            times = [statistics.median(samples) for samples in measured.prefill_s.values()]
            lines[subject] = (tokens, [count / time for count, time in zip(tokens, times, strict=True)])
    return curves(path, lines, "prompt tokens", "prefill, tokens/s", title="SmolLM2-135M, two threads")


def _json_number(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 3)


def _range(samples: Sequence[float], unit: str) -> str:
    low, high = spread(samples)
    return f"{low:.2f} .. {high:.2f} {unit} ({len(samples)})"


def commands(plan: EnginePlan, names: Sequence[str], runs: Runs) -> dict[str, list[str]]:
    """Subject -> command line. Peers' environments are made here; one that cannot be is noted as missing."""
    found = {
        "limits": [sys.executable, "-m", "bench.engine_limits", plan.argument("")],
        "kvrelay": [sys.executable, "-m", "bench.engine_kvrelay", plan.argument(MODEL)],
        "kvrelay_int8": [
            *(sys.executable, "-m", "bench.engine_kvrelay"),
            replace(plan, **engine_peers.NARROW, dtype="int8").argument(MODEL),
        ],
    }
    for peer in KNOWN:
        if peer.name in names:
            try:
                found[peer.name] = peer.command(plan)
            except (OSError, subprocess.CalledProcessError) as error:
                runs.missing[peer.name] = str(error)
    return {name: command for name, command in found.items() if name in names}


def main() -> None:
    """Exit code 1 if the engine itself could not be measured."""
    parser = arguments(__doc__)
    everyone = ["limits", "kvrelay", "kvrelay_int8", *(peer.name for peer in KNOWN)]
    parser.add_argument("--subjects", nargs="+", default=everyone, choices=everyone)
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--chunk", type=int, default=FULL.chunk, help="tokens of a prefill chunk")
    wanted = parser.parse_args()
    plan = replace(QUICK if wanted.quick else FULL, chunk=wanted.chunk)
    runs = Runs()
    prepared = commands(plan, wanted.subjects, runs)
    for _ in range(1 if wanted.quick else wanted.turns):
        for name, command in prepared.items():
            runs.turn(name, command)
    config = open_gguf_model(engine_peers.source())[0]
    report = Report(
        "engine", wanted.quick, {"plan": json.loads(plan.argument(MODEL)), "turns": wanted.turns}, emulated=ABOUT
    )
    report.figures = figures(runs, config)
    report.tables = [("medians and quartiles", ["subject", "work", "median", "quartiles (samples)", ""], table(runs))]
    report.data = {"samples": {name: asdict(one) for name, one in runs.measured.items()}, "missing": runs.missing}
    report.invalid = [f"{name}: {why}" for name, why in runs.missing.items() if name in ("limits", "kvrelay")]
    report.pictures = [picture(wanted.out / "engine.png", runs)]
    code = report.finish(wanted.out)
    for name, why in runs.missing.items():
        print(f"not measured: {name}: {why}")
    print(json.dumps({name: _json_number(figure.value) for name, figure in report.figures.items()}))
    sys.exit(code)


if __name__ == "__main__":
    main()
