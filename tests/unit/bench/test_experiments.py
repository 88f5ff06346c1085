"""The experiments' own parts: the synthetic trace, the tub on a toy, validity, the page."""

import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from bench import __main__ as everything
from bench import contest as contests
from bench.bathtub import Plan, bathtub, revenue
from bench.handoff import gaps_by_extend
from bench.lab import Health, Measured
from bench.output import Report, curves
from bench.paper import Plan as PaperPlan
from bench.rig import LOCAL, PDD, UNCACHED, Rig
from bench.trace import MOST_TOKENS, kept, synthetic
from kvrelay.load.arrival import plan as planned
from kvrelay.load.record import Record
from kvrelay.load.traces.replay import Cut, TraceFormat, load_rows


def test_the_synthetic_trace_is_a_valid_mooncake_trace_that_fits_the_model(tmp_path: Path) -> None:
    synthetic(tmp_path / "t.jsonl", 200)
    cut = Cut(length_scale=1 / 32, most_tokens=MOST_TOKENS)
    rows, too_long = load_rows(tmp_path / "t.jsonl", TraceFormat.MOONCAKE, cut)
    assert len(rows) + too_long == 200
    assert len(rows) > 150


def test_a_thinned_trace_keeps_whole_conversations(tmp_path: Path) -> None:
    synthetic(tmp_path / "t.jsonl", 200)
    rows, _ = load_rows(tmp_path / "t.jsonl", TraceFormat.MOONCAKE, Cut())
    few = kept(rows, 4)
    talks = {row.hash_ids[1] for row in few}
    assert 10 < len(few) < 120
    assert few == [row for row in rows if row.hash_ids[1] in talks]


def test_all_systems_are_asked_the_same_at_moments_that_only_differ_in_scale() -> None:
    plan = PaperPlan(requests=40)
    asked = {}
    for system in (LOCAL, PDD, UNCACHED):
        workload, arrival = plan.load(system, 3)
        asked[system.name] = list(itertools.islice(planned(arrival, workload.conversations()), 8))
    assert asked["pd-local"] == asked["pdd"]
    for (at_s, one), (late_s, other) in zip(asked["pdd"], asked["pd-remote-uncached"], strict=True):
        assert one == other
        assert abs(at_s / UNCACHED.rate_share - late_s) < 1e-9


def test_a_run_with_more_than_one_percent_overrun_steps_is_invalid() -> None:
    assert not Health(steps=1000, overrun=10).why_not()
    assert "overran" in Health(steps=1000, overrun=11).why_not()


def of_healths(healths: Iterator[Health]) -> Callable[..., contextlib.AbstractAsyncContextManager["Runs"]]:
    """Stands in for bench.lab.bench: each run is of the next health."""

    @contextlib.asynccontextmanager
    async def started(*_: object) -> AsyncIterator[Runs]:
        yield Runs(healths)

    return started


class Runs:
    def __init__(self, healths: Iterator[Health]) -> None:
        self.healths = healths

    async def run(self, workload: object, arrival: object) -> Measured:
        return Measured([], 1.0, 0, 0.0, next(self.healths))


@pytest.mark.parametrize(
    ("overruns", "kept", "again"), [([11, 9], 9, 1), ([11, 12, 13], 13, 2), ([0], 0, 0)], ids=["once", "in vain", "not"]
)
async def test_a_run_on_too_busy_a_machine_is_made_again_from_a_fresh_start_twice_at_most(
    overruns: list[int], kept: int, again: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    healths = iter([Health(1000, overrun) for overrun in overruns])

    monkeypatch.setattr(contests, "bench", of_healths(healths))
    result = (await contests.contest([PDD], Rig(), [1], PaperPlan().load))["pdd"]
    assert result.runs[1].health.overrun == kept
    assert len(result.repeated) == again
    assert bool(result.problems()) == (kept > 10)
    assert next(healths, None) is None


async def test_failed_requests_are_no_reason_to_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contests, "bench", of_healths(iter([Health(1000, 0, failed=1)])))
    result = (await contests.contest([PDD], Rig(), [1], PaperPlan().load))["pdd"]
    assert not result.repeated
    assert result.problems() == ["pdd, seed 1: 1 requests failed"]
    assert "2 requests failed" in Health(steps=1000, failed=2).why_not()


def test_an_invalid_report_ends_with_an_error_and_says_why(tmp_path: Path) -> None:
    report = Report("paper", True, {})
    assert report.finish(tmp_path) == 0
    report.invalid.append("11 of 1000 steps overran")
    assert report.finish(tmp_path) == 1
    assert "11 of 1000" in everything.markdown([report.json()], [])


def test_every_page_says_that_pace_and_wan_are_emulated() -> None:
    page = everything.markdown([Report("paper", True, {}).json()], ["trace"])
    assert "Paced engines" in page and "emulated WAN" in page and "`bench.trace` ended without a result" in page


def test_the_tub_is_measured_with_packing_off_and_on() -> None:
    plan = Plan(model="tiny", prompt_tokens=64, token_budget=32, requests=2, points=(0, 50), prices=(0.1,))
    found = bathtub(plan)
    assert all(len(found[name]) == 2 and min(found[name]) > 0 for name in ("off", "on"))


def test_revenue_weighs_cached_tokens_by_their_price() -> None:
    assert revenue([100.0, 200.0], (0, 50), 0.1) == [100.0, 110.00000000000001]


def test_gaps_are_told_apart_by_whether_an_extend_ran() -> None:
    relayed = Record("r", 0, "ok", sent_s=1.0, timeline=(("main_ready", 50.0),), sources="prm", arrived_ms=(0, 40, 100))
    other = Record("o", 0, "ok", sent_s=1.0, arrived_ms=(0.0, 40.0, 90.0, 140.0))
    assert gaps_by_extend([relayed], [other]) == ([50.0, 50.0], [40.0])


def test_a_picture_is_written(tmp_path: Path) -> None:
    assert curves(tmp_path / "x.png", {"a": ([1, 2], [3, 4])}, "x", "y") == "x.png"
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_a_result_names_the_command_that_makes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["bench", "--sweep"])
    assert Report("paper-sweep", False, {}, module="paper").json()["command"] == "python -m bench.paper --sweep"
    assert Report("trace", False, {}).json()["command"] == "python -m bench.trace --sweep"
