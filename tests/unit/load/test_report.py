"""Figures of a run, from records."""

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvrelay.load.record import Record
from kvrelay.load.report.files import read_jsonl, write_jsonl
from kvrelay.load.report.terminal import render
from kvrelay.load.spread import Spread
from kvrelay.load.summary import hit_rate, summarise


def record(**changes: Any) -> Record:
    whole: dict[str, Any] = {
        "conversation": "c",
        "turn": 0,
        "outcome": "ok",
        "prompt_tokens": 100,
        "output_tokens": 4,
        "pipeline": "p-md",
        "reason": "fits",
        "cached_prefill_tokens": 90,
        "cached_main_tokens": 50,
        "arrived_ms": (100.0, 110.0, 120.0, 130.0),
        "sources": "pmmm",
        "e2el_ms": 130.0,
        "wan_bytes": 1_000_000,
    }
    return Record(**(whole | changes))


def test_percentiles_are_interpolated() -> None:
    spread = Spread.of([1.0, None, 2.0, 3.0, 4.0])
    assert spread is not None
    assert (spread.count, spread.mean, spread.p50, spread.max) == (4, 2.5, 2.5, 4.0)
    assert (spread.p90, spread.p99) == (pytest.approx(3.7), pytest.approx(3.97))
    assert Spread.of([None]) is None


def test_failed_requests_count_as_failed_and_in_no_time() -> None:
    summary = summarise([record(), record(outcome="failed", error="UNAVAILABLE: x", arrived_ms=(9999.0,))], 2.0)
    assert (summary.requests, summary.ok, summary.failed) == (2, 1, 1)
    assert (summary.times_ms["TTFT"].count, summary.times_ms["TTFT"].p99) == (1, 100.0)
    assert summary.errors == {"UNAVAILABLE: x": 1}
    assert summary.output_tokens_per_s == 2.0


def test_hits_are_weighted_by_prompt_tokens() -> None:
    records = [record(), record(prompt_tokens=300, cached_prefill_tokens=150)]
    assert hit_rate(records, "prefill") == pytest.approx((90 + 150) / 400)


def test_gaps_belong_to_the_stage_that_ended_them_and_the_hand_off_is_apart() -> None:
    relayed = record(arrived_ms=(100.0, 110.0, 130.0, 135.0), sources="prmm")
    assert relayed.itl_by_source == {"relay": [10.0], "handoff": [20.0], "main": [5.0]}
    assert (relayed.ttft_ms, relayed.ttst_ms, relayed.max_gap_ms) == (100.0, 110.0, 20.0)


def test_a_slow_reader_and_the_warm_up_are_in_no_time() -> None:
    summary = summarise([record(), record(manner="slow", arrived_ms=(5e3, 6e3)), record(warm_up=True)], 1.0)
    assert summary.requests == 2
    assert summary.times_ms["TTFT"].count == 1


def test_no_record_at_all_still_renders() -> None:
    Console(quiet=True).print(render(summarise([], 0.0)))


def test_each_record_is_one_json_line_and_comes_back(tmp_path: Path) -> None:
    records = [record(), record(turn=1, handoff_stall_ms=4.0, timeline=(("planned", 1.0),))]
    write_jsonl(records, tmp_path / "run.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert [line["ttft_ms"] for line in lines] == [100.0, 100.0]
    assert read_jsonl(tmp_path / "run.jsonl") == records
