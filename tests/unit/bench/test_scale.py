"""bench.scale's own parts: costs by part, and the line on what fills first."""

from pathlib import Path

import pytest

from bench.output import Report
from bench.scale import Plan, Seen, part_of, spec, tell_all

ONE = Seen(1, 2.0, 100.0, {"main": 0.2, "router": 0.05}, {"main": 0.2, "router": 0.05}, 0.0)
FOUR = Seen(4, 6.0, 300.0, {"main": 1.2, "router": 0.15}, {"main": 0.3, "router": 0.15}, 0.02)


def test_a_process_belongs_to_its_part() -> None:
    assert [part_of(name) for name in ("main-3", "prefill-12", "router", "wan")] == ["main", "prefill", "router", "wan"]


def test_a_fleet_has_as_many_of_each_role_and_an_unlimited_link(tmp_path: Path) -> None:
    wanted = spec(Plan(), 3, tmp_path)
    assert len(wanted.stages()) == 9
    assert wanted.wan_rate == "0"


def test_costs_growth_and_what_fills_first_are_told(tmp_path: Path) -> None:
    report = Report("scale", True, {})
    tell_all(report, [ONE, FOUR], tmp_path)
    assert report.figures["growth_4"].value == 0.75
    assert report.figures["router_us_per_token"].value == pytest.approx(500.0)
    assert "busiest process is main (0.30" in report.data["fills_first"]
    assert "carry 2,000 tokens/s" in report.data["fills_first"]
    assert (tmp_path / "scale.png").exists()
