"""Made-up runs for the tests of reports."""

import random
from typing import Any

from kvrelay.load.record import Record
from kvrelay.load.report.page import Run
from kvrelay.load.summary import Surroundings, summarise
from kvrelay.load.surroundings import LinkSample
from kvrelay.load.worth import Prices, Slo

HOSTILE = "</title></svg><script>document.title = 'broken'</script> \"&' \udcff \x00"
"""Text that must stay text: an error's, a reason's, a file's name."""


def record(**changes: Any) -> Record:
    """A whole relayed answer of six tokens."""
    whole: dict[str, Any] = {
        "conversation": "c0",
        "turn": 0,
        "outcome": "ok",
        "request_id": "r0",
        "due_s": 0.9,
        "sent_s": 1.0,
        "queue_ms": 100.0,
        "prompt_tokens": 100,
        "output_tokens": 6,
        "pipeline": "p-rld-md",
        "reason": "kv-late",
        "prefill": "p1",
        "relay": "r1",
        "main": "m1",
        "cached_prefill_tokens": 80,
        "cached_main_tokens": 60,
        "arrived_ms": (100.0, 130.0, 160.0, 250.0, 280.0, 310.0),
        "sources": "prrmmm",
        "e2el_ms": 312.0,
        "handoff_stall_ms": 85.0,
        "wan_bytes": 500_000,
        "timeline": (("prefill_started", 20.0), ("main_ready", 170.0)),
    }
    return Record(**(whole | changes))


def many(count: int, seed: int = 1) -> list[Record]:
    """Over a minute: relayed and not, whole and not, the first tenth a warm-up."""
    draw = random.Random(seed)
    return [_drawn(draw, number, 60.0 * number / count) for number in range(count)]


def _drawn(draw: random.Random, number: int, sent_s: float) -> Record:
    relayed = draw.random() < 0.3
    sources = "p" + "r" * (draw.randint(5, 40) if relayed else 0) + "m" * draw.randint(30, 120)
    arrived = [60 + draw.expovariate(1 / 150)]
    for before, after in zip(sources, sources[1:], strict=False):
        arrived.append(arrived[-1] + 25 + draw.random() * (150 if before + after in ("rm", "pm") else 5))
    outcome = draw.choices(["ok", "failed", "cancelled", "unfinished"], [90, 5, 4, 1])[0]
    kept = len(arrived) if outcome == "ok" else draw.randint(0, len(arrived))
    prompt = draw.randint(200, 2000)
    return record(
        conversation=f"c{number}",
        outcome=outcome,
        error="UNAVAILABLE: no main stage is usable" if outcome == "failed" else "",
        failed_leg="main" if outcome == "failed" else "",
        warm_up=sent_s < 6,
        due_s=sent_s - draw.random() * 0.1,
        sent_s=sent_s,
        prompt_tokens=prompt,
        output_tokens=kept,
        pipeline="p-rld-md" if relayed else "p-md",
        reason="kv-late" if relayed else "kv-in-time",
        relay="r1" if relayed else "",
        cached_prefill_tokens=int(prompt * draw.betavariate(8, 1)),
        cached_main_tokens=int(prompt * draw.betavariate(4, 1)),
        arrived_ms=tuple(arrived[:kept]),
        sources=sources[:kept],
        e2el_ms=(arrived[:kept] or [400.0])[-1] + 2,
        handoff_stall_ms=90.0 if relayed and outcome == "ok" else None,
        fallbacks=("relay_paused",) if draw.random() < 0.05 else (),
    )


def watched(seconds: float, seed: int = 1) -> list[LinkSample]:
    """A link's counters, four a second."""
    draw, samples, crossed = random.Random(seed), [], 0
    for number in range(int(4 * seconds)):
        crossed += draw.randint(0, 500_000)
        samples.append(LinkSample(1000.0 + number / 4, crossed, 4000 * number, 0))
    return samples


def run_of(records: list[Record], **more: Any) -> Run:
    """With goodput and cost."""
    around = Surroundings(
        stages={"prefill": 1, "relay": 1, "main": 1}, kv_bytes_per_token=1000.0, pace="h20", steps=1000, steps_overrun=3
    )
    slo, prices = Slo.parse("ttft=300"), Prices.parse("prefill=2,relay=2,main=1")
    return Run(summarise(records, slo=slo, prices=prices, around=around), records, **more)
