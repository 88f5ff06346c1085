"""The summary against examples computed by hand."""

from typing import Any

import pytest

from kvrelay.load.record import Record
from kvrelay.load.summary import Surroundings, summarise
from kvrelay.load.worth import Prices, Slo


def relayed(**changes: Any) -> Record:
    """P's token at 100, two of the relay's, three of main's after a hand-off of 90 ms."""
    whole: dict[str, Any] = {
        "conversation": "c",
        "turn": 0,
        "outcome": "ok",
        "sent_s": 1.0,
        "due_s": 1.0,
        "prompt_tokens": 100,
        "output_tokens": 6,
        "pipeline": "p-rld-md",
        "reason": "kv-late",
        "prefill": "p",
        "relay": "r",
        "main": "m",
        "cached_prefill_tokens": 80,
        "cached_main_tokens": 60,
        "arrived_ms": (100.0, 130.0, 160.0, 250.0, 280.0, 320.0),
        "sources": "prrmmm",
        "e2el_ms": 325.0,
        "handoff_stall_ms": 85.0,
        "wan_bytes": 4000,
    }
    return Record(**(whole | changes))


def direct(**changes: Any) -> Record:
    """P's token at 50, main's from 300."""
    main = {
        "pipeline": "p-md",
        "reason": "kv-in-time",
        "relay": "",
        "output_tokens": 3,
        "arrived_ms": (50.0, 300.0, 320.0),
        "sources": "pmm",
        "e2el_ms": 322.0,
        "handoff_stall_ms": None,
        "cached_prefill_tokens": 100,
        "cached_main_tokens": 100,
        "wan_bytes": 0,
    }
    return relayed(**(main | changes))


def test_gaps_by_source_over_two_requests() -> None:
    times = summarise([relayed(), direct()]).times_ms
    assert times["ITL relay"].mean == 30.0 and times["ITL relay"].count == 2
    assert (times["ITL hand-off"].count, times["ITL hand-off"].max) == (1, 90.0)
    # main: 30 and 40 of the relayed one; 250 (from P's token, no hand-off) and 20 of the other
    assert (times["ITL main"].count, times["ITL main"].mean) == (4, 85.0)
    assert times["ITL"].count == 7
    assert times["ITL"].mean == pytest.approx((30 + 30 + 90 + 30 + 40 + 250 + 20) / 7)


def test_times_of_requests() -> None:
    times = summarise([relayed(), direct()]).times_ms
    assert (times["TTFT"].mean, times["TTFT"].std) == (75.0, 25.0)
    assert (times["TTST"].mean, times["TTST"].max) == (215.0, 300.0)
    assert times["TPOT"].mean == pytest.approx(((320 - 100) / 5 + (320 - 50) / 2) / 2)
    assert (times["E2EL"].p50, times["E2EL"].max) == (323.5, 325.0)
    assert (times["hand-off stall"].count, times["hand-off stall"].p50) == (1, 85.0)
    assert times["longest gap"].mean == (90 + 250) / 2
    assert times["TTFT"].p90 == pytest.approx(95.0) and times["TTFT"].p99 == pytest.approx(99.5)


def test_an_answer_of_one_token_has_no_time_per_token_and_no_gap() -> None:
    one = direct(output_tokens=1, arrived_ms=(50.0,), sources="p")
    times = summarise([one]).times_ms
    assert set(times) == {"TTFT", "E2EL", "client queue"}


def test_goodput_counts_those_that_keep_every_limit_and_bcr_divides_by_cost() -> None:
    records = [relayed(), direct(), direct(outcome="failed"), direct(outcome="cancelled")]
    summary = summarise(
        records,
        10.0,
        slo=Slo.parse("ttft=120,tpot=50"),
        prices=Prices.parse("prefill=2,relay=1.5,main=1"),
        around=Surroundings(stages={"prefill": 2, "relay": 1, "main": 4}),
    )
    # the relayed one: TTFT 100, TPOT 44; the direct one: TPOT 135
    assert summary.goodput_per_s == pytest.approx(0.1)
    assert summary.good_share == pytest.approx(0.25)
    assert summary.cost == pytest.approx(2 * 2 + 1.5 + 4)
    assert summary.bcr == pytest.approx(0.1 / 9.5)


def test_limits_of_the_second_token_the_whole_and_the_longest_gap() -> None:
    records = [relayed(), direct()]
    shares = {
        text: summarise(records, 1.0, slo=Slo.parse(text)).good_share
        for text in ("ttst=200", "gap=100", "e2el=323ms", "e2el=0.4s", "ttft=50")
    }
    assert shares == {"ttst=200": 0.5, "gap=100": 0.5, "e2el=323ms": 0.5, "e2el=0.4s": 1.0, "ttft=50": 0.5}


def test_without_limits_there_is_no_goodput_and_without_cost_no_bcr() -> None:
    bare = summarise([relayed()], 1.0)
    assert (bare.goodput_per_s, bare.good_share, bare.cost, bare.bcr) == (None, None, None, None)
    assert summarise([relayed()], 1.0, slo=Slo.parse("ttft=500")).bcr is None
    free = summarise([relayed()], 1.0, slo=Slo.parse("ttft=500"), prices=Prices.parse("main=1"))
    assert (free.cost, free.bcr) == (0.0, None)


def test_bytes_that_crossed_that_the_cache_saved_and_use_of_the_link() -> None:
    around = Surroundings(kv_bytes_per_token=100.0, link_bytes_per_s=1000.0, link_bytes=5000, cut_transfers=1)
    summary = summarise([relayed(), direct()], 10.0, around=around)
    assert summary.wan_bytes == 4000
    assert summary.saved_bytes == (60 + 100) * 100
    assert summary.link_use == pytest.approx(0.5)
    assert summary.cut_transfers == 1
    unknown = summarise([relayed()], 10.0)
    assert (unknown.saved_bytes, unknown.link_use) == (None, None)


def test_tokens_by_stage_and_the_relays_share() -> None:
    summary = summarise([relayed(), direct(), relayed(outcome="failed")], 1.0)
    assert summary.tokens == {"prefill": 2, "relay": 2, "main": 5}
    assert summary.relay_share == pytest.approx(2 / 9)


def test_hits_are_of_the_requests_that_asked_that_stage_and_the_gap_of_those_that_asked_both() -> None:
    no_p = direct(pipeline="md", prefill="", cached_prefill_tokens=0, cached_main_tokens=97)
    no_main = relayed(pipeline="p-rld", main="", cached_prefill_tokens=50, cached_main_tokens=0)
    summary = summarise([relayed(), no_p, no_main], 1.0)
    assert summary.hit_prefill == pytest.approx((80 + 50) / 200)
    assert summary.hit_main == pytest.approx((60 + 97) / 200)
    assert summary.hit_gap == pytest.approx(0.2)


def test_pipelines_fallbacks_errors_and_legs_are_counted_by_name() -> None:
    failed = relayed(outcome="failed", error="UNAVAILABLE: main died", failed_leg="main", fallbacks=("x",))
    lost = relayed(outcome="failed", error="the stream was cut")
    summary = summarise([relayed(fallbacks=("relay_paused",)), direct(manner="probe"), failed, lost, lost], 1.0)
    assert summary.reasons == {"p-rld-md: kv-late": 1, "p-md: kv-in-time": 1}
    assert summary.pipelines == {"p-rld-md": 1, "p-md": 1}
    assert summary.fallbacks == {"relay_paused": 1}
    assert summary.errors == {"the stream was cut": 2, "UNAVAILABLE: main died": 1}
    assert summary.failed_legs == {"none named": 2, "main": 1}
    assert summary.manners == {"probe": 1}


def test_the_runs_length_is_from_the_first_due_to_the_last_end() -> None:
    summary = summarise([relayed(due_s=0.5, sent_s=1.0), relayed(sent_s=2.0, due_s=2.0, e2el_ms=500.0)])
    assert summary.wall_s == pytest.approx(2.0)
    assert summary.requests_per_s == pytest.approx(1.0)
    assert summary.prompt_tokens_per_s == pytest.approx(100.0)
    assert summary.output_tokens_per_s == pytest.approx(6.0)


@pytest.mark.parametrize("wall_s", [0.0, 5e-324])
def test_a_run_of_no_length_has_no_rates(wall_s: float) -> None:
    summary = summarise([relayed()], wall_s)
    assert (summary.requests_per_s, summary.output_tokens_per_s) == (0.0, 0.0)


def test_outcomes_and_verdicts_are_counted_apart() -> None:
    summary = summarise(
        [relayed(matches=True), relayed(matches=False), relayed(outcome="unfinished"), relayed(outcome="cancelled")],
        1.0,
    )
    assert (summary.requests, summary.ok, summary.failed, summary.cancelled, summary.unfinished) == (4, 2, 0, 1, 1)
    assert (summary.checked, summary.wrong) == (2, 1)
