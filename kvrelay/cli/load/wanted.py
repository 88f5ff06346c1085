"""From flags to workloads and arrivals. Pure, but for the trace that it reads; bad values are ValueErrors."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from kvrelay.cli.load.flags import ArrivalKind, WorkloadKind
from kvrelay.load.agents import Agents
from kvrelay.load.arrival import Arrival, ClosedLoop, Constant, Gamma, Poisson, Ramp, TraceTimes
from kvrelay.load.groups import PrefixGroups
from kvrelay.load.hits import HitRates, SharedPrefixes
from kvrelay.load.lengths import Lengths, Spreading
from kvrelay.load.sweep import Search
from kvrelay.load.traces.replay import Cut, Replay, TraceFormat, load_rows
from kvrelay.load.workload import Workload

T = TypeVar("T")


def parsed(flag: str, parse: Callable[[str], T], text: str) -> T:
    """What a flag's text means. ValueError: the flag, and what it wants."""
    try:
        return parse(text)
    except ValueError as error:
        raise ValueError(f"{flag} {error}") from None


def finite(**flags: float | None) -> None:
    """ValueError: one of them is NaN or infinite; the message has it as a flag."""
    for name, value in flags.items():
        if value is not None and not math.isfinite(value):
            raise ValueError(f"--{name.replace('_', '-')} {value}: expected a finite number")


@dataclass(frozen=True, slots=True)
class Said:
    """What the flags say of a workload; lengths as text."""

    kind: WorkloadKind
    count: int
    """0: endless."""
    seed: int
    hits: str
    prompt_tokens: str
    output_tokens: str
    documents: int
    turns: str
    turn_tokens: str
    think_s: str
    groups: int
    prefix_tokens: str
    trace: Path | None = None
    trace_format: TraceFormat = TraceFormat.MOONCAKE
    cut: Cut = Cut()

    def workload(self, vocab_size: int, most_tokens: int | None) -> "Made":
        """In ids of this vocabulary. most_tokens: of a prompt and its answer, that the fleet can hold; None: any.

        ValueError: a flag is malformed. TraceError: the trace is. OSError: there is none.
        """
        if self.kind is WorkloadKind.TRACE:
            return self._replay(vocab_size, most_tokens)
        count = self.count or None
        prompt = parsed("--prompt-tokens", Lengths.parse, self.prompt_tokens)
        output = parsed("--output-tokens", Lengths.parse, self.output_tokens)
        prefix = parsed("--prefix-tokens", Lengths.parse, self.prefix_tokens)
        turn_tokens = parsed("--turn-tokens", Lengths.parse, self.turn_tokens)
        think_s, turns = parsed("--think", Spreading.parse, self.think_s), parsed("--turns", Lengths.parse, self.turns)
        if self.kind is WorkloadKind.RANDOM:
            groups = PrefixGroups(self.seed, vocab_size, count, prompt, output, self.groups, prefix)
            return Made(groups, self.count)
        if self.kind is WorkloadKind.AGENTS:
            agents = Agents(
                self.seed, vocab_size, count, prefix, prompt, turn_tokens, output, turns, think_s, self.documents
            )
            return Made(agents, self.count * (turns.low + turns.high) // 2)
        if turns.low != turns.high or turns.sigma:
            raise ValueError(f"--turns {self.turns}: one number here; --workload agents takes distributions")
        shared = SharedPrefixes(
            self.seed, vocab_size, count, parsed("--hits", HitRates.parse, self.hits), prompt, output,
            self.documents, turns.low, turn_tokens, think_s,
        )  # fmt: skip
        return Made(shared, self.count * turns.low)

    def _replay(self, vocab_size: int, most_tokens: int | None) -> "Made":
        if self.trace is None:
            raise ValueError("--workload trace needs --trace FILE")
        cut = replace(self.cut, most_tokens=most_tokens)
        rows, dropped = load_rows(self.trace, self.trace_format, cut)
        if not rows:
            raise ValueError(f"{self.trace}: no request is left of it ({dropped} were too long for the fleet)")
        note = f"{dropped} requests of the trace need more than {most_tokens} tokens and were left out"
        return Made(Replay(tuple(rows), cut, self.seed, vocab_size), len(rows), note if dropped else "")


@dataclass(frozen=True, slots=True)
class Made:
    """A workload and what a person should know of it."""

    workload: Workload
    requests: int
    """About so many; 0: not known."""
    note: str = ""


@dataclass(frozen=True, slots=True)
class When:
    """What the flags say of arrivals."""

    kind: ArrivalKind | None
    concurrency: int
    rate: float
    burstiness: float
    ramp: str
    seed: int
    sweep: str = ""
    sweep_share: float = 0.9

    def search(self, kind: WorkloadKind, duration_s: float | None) -> Search | None:
        """For the knee, if it was asked for. ValueError if flags do not fit."""
        if not self.sweep and self.kind is not ArrivalKind.SWEEP:
            return None
        if kind is WorkloadKind.TRACE:
            raise ValueError("--arrival sweep needs endless conversations: another --workload than trace")
        if duration_s is None:
            raise ValueError("--arrival sweep needs --duration, of each step")
        if self.kind not in (None, ArrivalKind.SWEEP):
            raise ValueError(f"--sweep {self.sweep}: --arrival is {self.kind}")
        return parsed("--sweep", lambda text: Search.parse(text, self.sweep_share), self.sweep or f"{self.rate or 1.0}")

    def arrival(self, kind: WorkloadKind) -> Arrival:
        """The one named, or else the one that the other flags call for. ValueError if they do not fit.

        Of a sweep, whatever: each step has its own.
        """
        named = self.kind or self._called_for(kind)
        if named in (ArrivalKind.POISSON, ArrivalKind.GAMMA, ArrivalKind.CONSTANT) and not self.rate:
            raise ValueError(f"--arrival {named} needs --rate")
        if named is ArrivalKind.TRACE and kind is not WorkloadKind.TRACE:
            raise ValueError("--arrival trace needs --workload trace")
        if named is ArrivalKind.POISSON:
            return Poisson(self.rate, self.seed)
        if named is ArrivalKind.GAMMA:
            return Gamma(self.rate, self.seed, self.burstiness)
        if named is ArrivalKind.CONSTANT:
            return Constant(self.rate)
        if named is ArrivalKind.RAMP:
            return parsed("--ramp", lambda text: parse_ramp(text, self.seed), self.ramp)
        return TraceTimes() if named is ArrivalKind.TRACE else ClosedLoop(self.concurrency)

    def _called_for(self, kind: WorkloadKind) -> ArrivalKind:
        if self.ramp:
            return ArrivalKind.RAMP
        if self.rate:
            return ArrivalKind.POISSON if self.burstiness == 1 else ArrivalKind.GAMMA
        return ArrivalKind.TRACE if kind is WorkloadKind.TRACE else ArrivalKind.CLOSED


def parse_ramp(text: str, seed: int) -> Ramp:
    """ "1-8:30": from 1/s to 8/s within 30 s. ValueError otherwise."""
    try:
        rates, _, seconds = text.partition(":")
        low, _, high = rates.partition("-")
        ramp = Ramp(float(low), float(high), float(seconds), seed)
    except ValueError:
        raise ValueError(f"{text!r}: expected FROM-TO:SECONDS") from None
    if not (0 <= ramp.from_per_s < math.inf and 0 < ramp.to_per_s < math.inf and 0 < ramp.ramp_s < math.inf):
        raise ValueError(f"{text}: expected finite rates, FROM >= 0 and TO > 0, and seconds > 0")
    return ramp
