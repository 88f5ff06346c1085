"""The knee of a system whose capacity is known."""

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from kvrelay.cli.load.sweep_table import knee_line, sweep_table, write_csv, write_json
from kvrelay.load.groups import PrefixGroups
from kvrelay.load.lengths import Lengths
from kvrelay.load.record import Record
from kvrelay.load.run import LoadOptions
from kvrelay.load.sweep import Search, Step, knee, next_rate, step_of, sweep
from kvrelay.load.worth import Slo
from tests.unit.load.served import ServedTarget, Simulated

ENDLESS = PrefixGroups(1, 5000, None, Lengths(4, 8), Lengths(4, 4))


def options(duration_s: float | None = 30.0) -> LoadOptions:
    return LoadOptions(ServedTarget(), ENDLESS, duration_s=duration_s)


@pytest.mark.parametrize(("slots", "service_s"), [(4, 0.25), (10, 1.0), (32, 0.5)])
async def test_it_finds_the_rate_that_a_server_can_carry(slots: int, service_s: float) -> None:
    server = Simulated(slots, service_s)
    steps, _ = await sweep(options(), Search(1.0), None, 1, server.run)
    found = knee(steps)
    assert found is not None
    capacity = slots / service_s
    assert 0.6 * capacity <= found.rate_per_s <= 1.1 * capacity
    assert server.rates[:3] == [1.0, 2.0, 4.0]
    assert all(step.why_not for step in steps if not step.carried)


async def test_limits_lower_the_knee() -> None:
    loose, strict = Simulated(4, 0.25), Simulated(4, 0.25)
    slow, _ = await sweep(options(), Search(1.0), Slo.parse("ttft=5s"), 1, loose.run)
    fast, _ = await sweep(options(), Search(1.0), Slo.parse("ttft=80ms"), 1, strict.run)
    at_ease, pressed = knee(slow), knee(fast)
    assert at_ease is not None and pressed is not None
    assert pressed.rate_per_s < at_ease.rate_per_s
    assert "within the limits" in next(step.why_not for step in fast if not step.carried)


async def test_no_step_asks_what_an_earlier_one_asked() -> None:
    server = Simulated(2, 0.5)
    await sweep(options(10.0), Search(1.0), None, 1, server.run)
    assert len(server.conversations) == len(set(server.conversations))


async def test_the_highest_rate_allowed_may_be_carried() -> None:
    server = Simulated(100, 0.1)
    steps, _ = await sweep(options(), Search(1.0, 6.0), None, 1, server.run)
    assert server.rates == [1.0, 2.0, 4.0, 6.0]
    assert "not reached" in knee_line(steps)


async def test_a_system_that_cannot_carry_the_first_rate_has_no_knee() -> None:
    server = Simulated(1, 30.0)
    steps, _ = await sweep(options(10.0), Search(5.0), None, 1, server.run)
    assert knee(steps) is None
    assert server.rates == [5.0]
    assert "below the lowest rate" in knee_line(steps)


async def test_a_sweep_needs_a_duration() -> None:
    with pytest.raises(ValueError, match="duration"):
        await sweep(options(None), Search(), None, 1, Simulated(1, 1.0).run)


def step(rate_per_s: float, carried: bool) -> Step:
    return Step(rate_per_s, 10, 10, 10, None, None, 1.0, carried, "" if carried else "80% in time")


@given(st.floats(1.0, 1000.0), st.floats(1.1, 4.0))
def test_the_search_ends_close_below_the_true_knee(true: float, factor: float) -> None:
    search, steps = Search(1.0, factor=factor, most_steps=100), list[Step]()
    while (rate := next_rate(search, steps)) is not None:
        steps.append(step(rate, rate <= true))
    found = knee(steps)
    assert found is not None
    assert found.rate_per_s <= true < found.rate_per_s * (1 + search.precision) * (1 + 1e-9)
    assert len(steps) <= 2 + math.ceil(math.log(true, factor)) + 5


def test_a_rate_that_failed_once_bounds_the_knee_whatever_was_carried_above_it() -> None:
    found = knee([step(1, True), step(2, True), step(4, False), step(8, True)])
    assert found is not None and found.rate_per_s == 2


def test_a_step_with_failures_is_not_carried() -> None:
    good = Record("c", 0, "ok", output_tokens=1, arrived_ms=(5.0,), e2el_ms=5.0)
    bad = Record("c", 0, "failed")
    assert step_of(10.0, 1.0, [good] * 9 + [bad], None).carried
    refused = step_of(10.0, 1.0, [good] * 8 + [bad] * 2, None)
    assert (refused.carried, refused.why_not) == (False, "2 not whole")
    assert step_of(10.0, 1.0, [], None).why_not == "nothing was due"


@pytest.mark.parametrize("text", ["", "x", "0", "-1", "3-1", "1-x", "nan", "inf"])
def test_ranges_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Search.parse(text)


async def test_a_sweep_is_a_table_a_json_and_a_csv(tmp_path: Path) -> None:
    steps, _ = await sweep(options(20.0), Search.parse("2-64"), None, 1, Simulated(4, 0.25).run)
    Console(quiet=True).print(sweep_table(steps))
    found = knee(steps)
    assert found is not None
    document, lines = await asyncio.to_thread(written, steps, tmp_path)
    assert document["knee_per_s"] == found.rate_per_s
    assert lines[0].startswith("rate_per_s,requests,in_time,good,ttft.count")
    assert len(lines) == 1 + len(steps)


def written(steps: list[Step], folder: Path) -> tuple[dict[str, Any], list[str]]:
    write_json(steps, folder / "sweep.json")
    write_csv(steps, folder / "sweep.csv")
    return json.loads((folder / "sweep.json").read_text()), (folder / "sweep.csv").read_text().splitlines()
