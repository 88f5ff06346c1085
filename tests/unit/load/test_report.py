"""Figures of a run, from records."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvrelay.load.report import Spread, render, summarize, write_jsonl
from kvrelay.load.run import Record


def record(**changes: Any) -> Record:
    whole: dict[str, Any] = {
        "conversation": "c",
        "turn": 0,
        "request_id": "r",
        "ok": True,
        "error": "",
        "sent_s": 0.0,
        "prompt_tokens": 100,
        "output_tokens": 4,
        "pipeline": "p-md",
        "reason": "fits",
        "hit_prefill": 0.9,
        "hit_main": 0.5,
        "tokens_prefill": 1,
        "tokens_relay": 0,
        "tokens_main": 3,
        "ttft_ms": 100.0,
        "ttst_ms": 110.0,
        "tpot_ms": 10.0,
        "e2el_ms": 130.0,
        "itl_ms": [10.0, 10.0, 10.0],
        "handoff_mode": "",
        "handoff_stall_ms": None,
        "max_gap_ms": 10.0,
        "wan_bytes": 1_000_000,
        "fallbacks": [],
    }
    return Record(**(whole | changes))


def test_percentiles_are_interpolated() -> None:
    assert Spread.of([1.0, None, 2.0, 3.0, 4.0]) == Spread(2.5, 2.5, pytest.approx(3.7), pytest.approx(3.97))
    assert Spread.of([None]) is None


def test_failed_requests_count_as_failed_and_in_no_time() -> None:
    summary = summarize([record(), record(ok=False, error="UNAVAILABLE: x", ttft_ms=9999.0)], 2.0)
    assert (summary.requests, summary.failed) == (2, 1)
    assert summary.times_ms["TTFT"] == Spread(100, 100, 100, 100)
    assert summary.errors == {"UNAVAILABLE: x": 1}
    assert summary.output_tokens_per_s == 2.0


def test_hits_are_weighted_by_prompt_tokens() -> None:
    summary = summarize([record(), record(prompt_tokens=300, hit_prefill=0.5)], 1.0)
    assert summary.hit_prefill == pytest.approx((0.9 * 100 + 0.5 * 300) / 400)


def test_no_record_at_all_still_renders() -> None:
    Console(quiet=True).print(render(summarize([], 0.0)))


def test_each_record_is_one_json_line(tmp_path: Path) -> None:
    write_jsonl([record(), record(turn=1)], tmp_path / "run.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert lines == [asdict(record()), asdict(record(turn=1))]
