"""A run at each of several rates, and the knee: the highest rate that the system carries. All but `sweep` is pure."""

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from kvrelay.load.arrival import Poisson
from kvrelay.load.record import Record
from kvrelay.load.run import LoadOptions
from kvrelay.load.spread import Spread
from kvrelay.load.worth import Slo

BLOWN_UP = 5.0
"""A P90 of TTFT beyond so many times the lowest rate's is a queue that grows."""
USUAL = 2.0
"""After its end, a step waits for answers as long as so many times the lowest rate's median."""


@dataclass(frozen=True, slots=True)
class Search:
    """Where to look for the knee: rates rise by `factor` until one is not carried, then the bracket is halved."""

    low_per_s: float = 1.0
    """Taken as the system at ease: later steps are judged against it."""
    high_per_s: float = math.inf
    factor: float = 2.0
    precision: float = 0.1
    """The search ends when the lowest rate not carried is at most this share above the knee."""
    most_steps: int = 16
    share: float = 0.9
    """Of a step's requests: so many must be answered in time and within the limits for its rate to be carried."""

    def __post_init__(self) -> None:
        if not 0 < self.low_per_s <= self.high_per_s or math.isinf(self.low_per_s):
            raise ValueError(f"{self.low_per_s:g}-{self.high_per_s:g}: expected 0 < low <= high requests/s")
        if not 0 < self.share <= 1:
            raise ValueError(f"{self.share:g}: expected a share in (0, 1]")

    @classmethod
    def parse(cls, text: str, share: float = 0.9) -> "Search":
        """ "2" (from there upwards) or "2-64". ValueError otherwise."""
        low, dash, high = text.partition("-")
        try:
            return cls(float(low), float(high) if dash else math.inf, share=share)
        except ValueError as error:
            why = str(error) if "expected" in str(error) else "expected FROM or FROM-TO in requests/s"
            raise ValueError(f"{text!r}: {why}") from None


@dataclass(frozen=True, slots=True)
class Step:
    """What one rate showed."""

    rate_per_s: float
    requests: int
    in_time: int
    """Whole, and ended before the step, or as soon after it as answers usually take."""
    good: int
    """That kept the limits; all that are whole, without any."""
    ttft: Spread | None
    e2el: Spread | None
    output_tokens_per_s: float
    carried: bool
    why_not: str = ""
    """Of a rate that was not carried."""


def step_of(
    rate_per_s: float,
    duration_s: float,
    records: Sequence[Record],
    slo: Slo | None,
    *,
    share: float = 0.9,
    first: Step | None = None,
) -> Step:
    """From a step's records. first: the lowest rate's step, which says what is usual; None: this is it."""
    counted = [record for record in records if not record.warm_up]
    whole = [record for record in counted if record.ok]
    ttft, e2el = Spread.of(record.ttft_ms for record in whole), Spread.of(record.e2el_ms for record in whole)
    usual = first.e2el if first and first.e2el else e2el
    end_s = duration_s + USUAL * (usual.p50 / 1e3 if usual else 0.0)
    ended = [record for record in whole if record.sent_s + record.e2el_ms / 1e3 <= end_s]
    good = sum(slo.kept_by(record) for record in counted) if slo else len(whole)
    why_not = ""
    if not counted:
        why_not = "nothing was due"
    elif len(whole) < share * len(counted):
        why_not = f"{len(counted) - len(whole)} not whole"
    elif good < share * len(counted):
        why_not = f"{good / len(counted):.0%} within the limits"
    elif len(ended) < share * len(counted):
        why_not = f"{len(ended) / len(counted):.0%} in time"
    elif not slo and first and first.ttft and ttft and ttft.p90 > BLOWN_UP * first.ttft.p90:
        why_not = f"TTFT P90 {ttft.p90 / first.ttft.p90:.1f} x the first step's"
    return Step(
        rate_per_s=rate_per_s,
        requests=len(counted),
        in_time=len(ended),
        good=good,
        ttft=ttft,
        e2el=e2el,
        output_tokens_per_s=sum(record.output_tokens for record in ended) / duration_s,
        carried=not why_not,
        why_not=why_not,
    )


def knee(steps: Sequence[Step]) -> Step | None:
    """The highest rate carried below every rate that was not; None: not even the lowest."""
    broken = min((step.rate_per_s for step in steps if not step.carried), default=math.inf)
    carried = [step for step in steps if step.carried and step.rate_per_s < broken]
    return max(carried, key=lambda step: step.rate_per_s, default=None)


def next_rate(search: Search, steps: Sequence[Step]) -> float | None:
    """The rate to try after these; None: the knee is found, or there is none in the range."""
    if not steps:
        return search.low_per_s
    found = knee(steps)
    if found is None or len(steps) >= search.most_steps:
        return None
    broken = min((step.rate_per_s for step in steps if not step.carried), default=math.inf)
    if math.isinf(broken):
        return (
            min(found.rate_per_s * search.factor, search.high_per_s) if found.rate_per_s < search.high_per_s else None
        )
    if broken <= found.rate_per_s * (1 + search.precision):
        return None
    return math.sqrt(found.rate_per_s * broken)


async def sweep(
    options: LoadOptions,
    search: Search,
    slo: Slo | None,
    seed: int,
    run: Callable[[LoadOptions], Awaitable[Sequence[Record]]],
    observe: Callable[[Step], None] = lambda step: None,
) -> tuple[list[Step], list[list[Record]]]:
    """Runs at each rate for options.duration_s, each on new conversations; `observe` hears of each step.

    ValueError: there is no duration.
    """
    if options.duration_s is None:
        raise ValueError("a sweep needs a duration")
    steps: list[Step] = []
    runs: list[list[Record]] = []
    skip = options.skip
    while (rate := next_rate(search, steps)) is not None:
        number = len(steps)
        warm = options.warm_caches and not number
        records = await run(replace(options, arrival=Poisson(rate, seed + number), skip=skip, warm_caches=warm))
        first = steps[0] if steps else None
        steps.append(step_of(rate, options.duration_s, records, slo, share=search.share, first=first))
        runs.append(list(records))
        skip += len({record.conversation for record in records})
        observe(steps[-1])
    return steps, runs
