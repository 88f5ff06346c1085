"""Figures are right on records made by hand."""

from typing import Any

import numpy as np
import pytest

from bench import figures as f
from bench.figures import Figure
from bench.rig import LOCAL, PDD, SYSTEMS, Prices, Rig, Sla, wan_rate
from kvrelay.load.record import Record


def record(arrived: tuple[float, ...] = (100.0, 150.0), sources: str = "pm", **more: Any) -> Record:
    return Record("a", 0, "ok", arrived_ms=arrived, sources=sources, output_tokens=len(arrived), **more)


def test_a_ratio_of_equal_times_is_one_with_no_doubt() -> None:
    times = np.array([1.0, 2.0, 3.0, 10.0])
    figure = f.ratio(times, times, 90, "<= 1.05")
    assert (figure.value, figure.low, figure.high, figure.met) == (1.0, 1.0, 1.0, True)


def test_a_cut_is_what_share_of_the_time_has_gone() -> None:
    figure = f.cut(np.array([1.0] * 50), np.array([4.0] * 50), 50, ">= 0.8")
    assert figure.value == 0.75
    assert figure.met is False


def test_intervals_widen_with_the_spread_and_hold_the_value() -> None:
    chance = np.random.default_rng(1)
    ours, theirs = chance.uniform(50, 150, 200), chance.uniform(100, 300, 200)
    figure = f.ratio(ours, theirs, 50)
    assert figure.low is not None and figure.high is not None
    assert figure.low < figure.value < figure.high < 1


def test_only_requests_that_all_systems_answered_are_compared() -> None:
    runs = {
        "x": {(1, "a"): record(), (1, "b"): record(), (1, "c"): record(arrived=(1.0,), sources="p")},
        "y": {(1, "a"): record(), (1, "c"): record(), (2, "b"): record()},
    }
    assert f.common_keys(runs) == [(1, "a")]


def test_the_low_hit_quarter_is_by_hits_at_prefill() -> None:
    run = {(1, str(n)): record(prompt_tokens=100, cached_prefill_tokens=100 - n) for n in range(8)}
    assert f.lowest_hits(run, list(run)) == [(1, "7"), (1, "6")]


def test_the_relay_share_counts_output_tokens() -> None:
    assert f.relay_share([record(arrived=(1.0,) * 8, sources="prrmmmmm")]) == 0.25


@pytest.mark.parametrize(("wan_bytes", "expected"), [(20 * 16 * 512, 1.0), (100 * 16 * 512, 0.0)])
def test_the_wan_cut_is_one_if_only_what_missed_has_crossed(wan_bytes: int, expected: float) -> None:
    one = record(prompt_tokens=1600, cached_prefill_tokens=1280, cached_main_tokens=1280)
    assert f.wan_cut_vs_ideal([one], wan_bytes) == pytest.approx(expected)


def test_a_gap_counts_beyond_what_pd_local_has() -> None:
    relayed = {(1, "a"): record(arrived=(0.0, 300.0), sources="pr"), (1, "b"): record(arrived=(0.0, 900.0))}
    local = {(1, "a"): record(arrived=(0.0, 100.0)), (1, "b"): record()}
    assert f.gap_over_bound(relayed, local, 100.0) == 2.0
    assert f.gap_over_bound({}, local, 100.0) == 0.0


def test_goodput_counts_answers_within_every_limit() -> None:
    sla = Sla(ttft_ms=120, ttst_ms=200, tpot_ms=60)
    records = [record(due_s=10.0), record(arrived=(100.0, 190.0)), record(arrived=(130.0, 150.0))]
    assert f.goodput(records, sla) == 0.1


def test_a_figure_without_a_target_is_neither_met_nor_missed() -> None:
    assert Figure(1.0).met is None


def test_every_system_has_as_many_decode_slots_and_prefill_stages_and_the_same_pace(tmp_path: object) -> None:
    rig = Rig()
    specs = [system.cluster(rig, tmp_path) for system in SYSTEMS]  # type: ignore[arg-type]
    assert {sum(system.slots(rig).values()) for system in SYSTEMS} == {rig.decode_slots}
    assert {(spec.prefill, spec.pace, spec.wan_rate, spec.wan_delay_ms) for spec in specs} == {
        (1, rig.pace, wan_rate(rig.wan_rate_bytes_per_s), rig.wan_delay_ms)
    }


def test_pdd_costs_a_little_less_than_pd_local_at_the_papers_prices() -> None:
    assert 0.92 < Prices().cost(PDD, Rig()) / Prices().cost(LOCAL, Rig()) < 0.97


def test_the_bound_is_a_round_trip_and_three_steps() -> None:
    assert Rig(pace="fixed=40", wan_delay_ms=5).bound_ms == 130.0
