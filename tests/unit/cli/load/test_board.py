"""What a run shows while it lasts, and that showing it costs the run next to nothing."""

import io
import random

import numpy as np
import pytest
from rich.console import Console

from kvrelay.cli.load.board import LINES_S, WINDOW_S, Board, Quantiles, progress
from kvrelay.load.record import Record
from kvrelay.load.run import Progress


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def ended(sent: int, done: int, ttft_ms: float = 80.0, outcome: str = "ok") -> Progress:
    arrived = (ttft_ms,) if outcome == "ok" else ()
    return Progress(sent, done, Record("c", 0, outcome, arrived_ms=arrived))


def test_before_the_first_request_it_warms_up() -> None:
    assert Board().line() == "warming up"


def test_the_line_has_the_rate_of_late_those_running_ttft_so_far_and_failures() -> None:
    clock = Clock()
    board = Board(clock=clock)
    for number in range(20):
        board(Progress(number + 1, number))
        clock.now += 0.5
        board(ended(number + 1, number + 1, 1000.0 if number >= 16 else 80.0))
    board(Progress(21, 20))
    board(ended(21, 21, outcome="failed"))
    line = board.line()
    assert line.startswith("2.2/s, 0 running")
    assert "1 failed" in line
    p50, p90 = (float(part.split()[-1].replace(",", "")) for part in line.split("TTFT")[1].split(" ms")[0].split(", "))
    assert p50 == pytest.approx(80, rel=0.02) and p90 == pytest.approx(1000, rel=0.02)


def test_a_run_that_hangs_does_not_keep_its_rate() -> None:
    clock = Clock()
    board = Board(clock=clock)
    board(Progress(1, 0))
    board(ended(2, 1))
    assert board.rate_per_s > 0
    clock.now += WINDOW_S + 1
    assert board.line().startswith("0.0/s, 1 running")


def test_an_event_computes_no_percentile_and_draws_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: Quantiles, share: float) -> float:
        raise AssertionError("computed for an event")

    monkeypatch.setattr(Quantiles, "at", refused)
    board = Board()
    for number in range(1000):
        board(ended(number + 1, number + 1))
    assert board.done == 1000


def test_what_it_keeps_does_not_grow_with_the_run() -> None:
    clock = Clock()
    board = Board(clock=clock)
    for number in range(10_000):
        clock.now += 0.01
        board(ended(number + 1, number + 1))
    assert len(board._ended_s) <= WINDOW_S / 0.01 + 1


def test_quantiles_are_within_a_hundredth() -> None:
    draw = random.Random(1)
    values = [draw.lognormvariate(5, 1.5) for _ in range(5000)]
    quantiles = Quantiles()
    for value in values:
        quantiles.add(value)
    for share in (0.01, 0.5, 0.9, 0.99):
        exact = float(np.quantile(values, share, method="inverted_cdf"))
        assert quantiles.at(share) == pytest.approx(exact, rel=0.011)


@pytest.mark.parametrize("value", [0.0, -1.0, 1e30])
def test_values_out_of_range_count_as_the_nearest(value: float) -> None:
    quantiles = Quantiles()
    assert quantiles.at(0.5) == 0
    quantiles.add(value)
    assert quantiles.count == 1 and quantiles.at(0.5) > 0


def test_on_a_terminal_the_last_picture_is_the_whole_run() -> None:
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=120, color_system=None)
    with progress(3, console) as board:
        for number in range(3):
            board(Progress(number + 1, number))
            board(ended(number + 1, number + 1))
    last = written.getvalue().rsplit("requests", 1)[-1]
    assert "3/3" in last and "0 running" in last and "TTFT p50 80" in last


def test_without_a_terminal_a_line_comes_now_and_then() -> None:
    clock = Clock()
    lines: list[str] = []
    board = Board(lines.append, total=100, clock=clock)
    for number in range(100):
        clock.now += 0.4
        board(ended(number + 1, number + 1))
    assert len(lines) == int(99 * 0.4 / LINES_S)
    assert lines[0].startswith("26 of 100 requests, 2.")


def test_in_a_pipe_nothing_is_drawn() -> None:
    written = io.StringIO()
    with progress(1, Console(file=written)) as board:
        board(ended(1, 1))
    assert written.getvalue() == ""
