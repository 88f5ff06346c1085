"""The window finds a link's rate and round trip, on a link made of arithmetic."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvrelay.transfer.window import MAX_WINDOW_BYTES, MIN_WINDOW_BYTES, PROBE_AFTER_S, Flight, Window

FRAME = 256 * 1024


class PlainLink:
    """A link of a fixed rate and round trip, kept as full as the window allows, in simulated time."""

    def __init__(self, rate: float, round_trip_s: float, frame: int = FRAME) -> None:
        self.rate, self.round_trip_s, self.frame = rate, round_trip_s, frame
        self.window = Window(frame)
        self.now = 100.0
        self.free_at = 0.0
        self.under_way: list[tuple[float, Flight]] = []
        self.acked = 0

    def run(self, seconds: float) -> float:
        """Bytes a second that it carried."""
        end, before, began = self.now + seconds, self.acked, self.now
        while self.now < end:
            while self.window.admits(self.frame, self.now):
                self.free_at = max(self.free_at, self.now) + self.frame / self.rate
                self.under_way.append((self.free_at + self.round_trip_s, self.window.sent(self.frame, self.now)))
            self.now, flight = self.under_way.pop(0)
            self.window.acked(flight, self.now)
            self.acked += self.frame
        return (self.acked - before) / (self.now - began)

    def lose(self) -> None:
        """Every lane breaks."""
        for _, flight in self.under_way:
            self.window.lost(flight)
        self.under_way.clear()
        assert self.window.in_flight == 0

    def drain(self) -> None:
        self.window.starved()
        for at, flight in self.under_way:
            self.now = at
            self.window.acked(flight, at)
        self.under_way.clear()


@pytest.mark.parametrize("rate", [1e6, 12.5e6, 125e6])
@pytest.mark.parametrize("round_trip_s", [0.001, 0.02, 0.06])
def test_a_full_link_is_measured_and_filled(rate: float, round_trip_s: float) -> None:
    link = PlainLink(rate, round_trip_s)
    link.run(3.0)
    assert link.run(10.0) > 0.95 * rate
    assert link.window.goodput == pytest.approx(rate, rel=0.1)


def test_the_window_is_never_smaller_or_larger_than_its_bounds() -> None:
    window = Window(FRAME)
    assert window.size == MIN_WINDOW_BYTES
    link = PlainLink(1e9, 0.2)
    link.run(5.0)
    assert link.window.size == MAX_WINDOW_BYTES


@pytest.mark.parametrize("rate", [60e3, 125e3, 250e3])
def test_a_very_thin_link_holds_no_more_than_keep_alive_can_wait_for(rate: float) -> None:
    link = PlainLink(rate, 0.02)
    link.run(60.0)
    assert link.run(30.0) > 0.9 * rate
    assert link.window.size / rate < 4.5


def test_a_long_saturated_link_does_not_take_its_own_queue_for_distance() -> None:
    link = PlainLink(10e6, 0.02)
    link.run(60.0)
    assert link.window.round_trip_s is not None
    assert link.window.round_trip_s < 0.02 + 2 * FRAME / 10e6


def test_a_longer_path_is_found_out_while_the_link_is_busy() -> None:
    link = PlainLink(50e6, 0.005)
    link.run(5.0)
    link.round_trip_s = 0.08
    link.run(3 * PROBE_AFTER_S)
    assert link.run(5.0) > 0.9 * 50e6


def test_the_first_frame_on_an_idle_link_measures_a_round_trip_and_holds_nothing_back() -> None:
    link = PlainLink(50e6, 0.02)
    link.run(3.0)
    link.drain()
    link.now += PROBE_AFTER_S + 1.0
    flight = link.window.sent(FRAME, link.now)
    assert link.window.admits(FRAME, link.now)
    link.window.sent(FRAME, link.now)
    link.window.acked(flight, link.now + 0.03)
    assert link.window.round_trip_s == pytest.approx(0.03)


def test_small_transfers_do_not_make_a_fast_link_look_slow() -> None:
    link = PlainLink(50e6, 0.05)
    link.run(5.0)
    link.drain()
    for _ in range(100):
        link.now += 0.5
        flight = link.window.sent(8192, link.now)
        link.window.starved()
        link.now += 0.05
        link.window.acked(flight, link.now)
    assert link.window.goodput == pytest.approx(50e6, rel=0.1)


def test_a_slower_link_is_noticed_within_seconds() -> None:
    link = PlainLink(50e6, 0.01)
    link.run(3.0)
    link.rate = 5e6
    link.run(12.0)
    assert link.window.goodput == pytest.approx(5e6, rel=0.15)


def test_a_link_that_has_become_much_slower_does_not_hold_seconds_of_what_it_once_bore() -> None:
    """Its round trips are as long as the window, so eight of them would be half a minute."""
    link = PlainLink(40e6, 0.06)
    link.run(0.5)
    link.rate = 2e6
    link.run(10.0)
    assert link.window.size / 2e6 < 1.0
    assert link.run(3.0) > 0.9 * 2e6


def test_a_link_that_is_fast_again_after_a_slow_moment_is_full_again_within_a_second() -> None:
    link = PlainLink(40e6, 0.06)
    link.run(2.0)
    link.rate = 2e6
    link.run(3.0)
    link.rate = 40e6
    link.run(link.free_at - link.now + 0.75)  # what was queued before still crosses at the slow rate
    assert link.run(0.5) > 0.95 * 40e6


def test_lost_frames_leave_the_window() -> None:
    window = Window(FRAME)
    flights = [window.sent(1000, 1.0) for _ in range(3)]
    for flight in flights:
        window.lost(flight)
    assert window.in_flight == 0
    assert window.rate == 0.0


@pytest.mark.parametrize("rate", [0.5e6, 2e6])
def test_a_thin_link_makes_a_small_push_wait_only_briefly(rate: float) -> None:
    link = PlainLink(rate, 0.004, frame=8192)
    link.run(5.0)
    assert link.run(5.0) > 0.95 * rate
    assert link.window.size <= max(0.05 * rate, 2 * 0.004 * rate + 4 * 8192)


@pytest.mark.parametrize("round_trip_s", [0.02, 0.04])
def test_a_full_link_has_a_short_queue_so_that_little_stands_before_what_is_urgent(round_trip_s: float) -> None:
    link = PlainLink(125e6, round_trip_s)
    link.run(3.0)
    assert link.window.queue_s < 0.25 * round_trip_s + 0.01
    assert link.window.size / 125e6 - round_trip_s < 0.3 * round_trip_s + 0.012


def test_a_fat_link_is_full_after_a_few_round_trips() -> None:
    link = PlainLink(125e6, 0.04)
    link.run(12 * 0.04)
    assert link.window.size > 125e6 * 0.04


def test_acknowledgements_that_come_in_bursts_do_not_make_a_link_look_faster() -> None:
    """An event loop that is late for 30 ms now and then hears of everything at once."""
    link = PlainLink(125e6, 0.04)
    heard = link.window.acked

    def late(flight: Flight, now: float) -> None:
        heard(flight, now if now % 0.2 > 0.03 else now - now % 0.2 + 0.03)

    link.window.acked = late  # type: ignore[method-assign]
    link.run(5.0)
    assert link.window.rate < 1.15 * 125e6


def test_a_link_that_has_become_faster_is_full_again_within_twenty_round_trips() -> None:
    link = PlainLink(20e6, 0.04)
    link.run(5.0)
    link.rate = 125e6
    link.run(20 * 0.04)
    assert link.run(2.0) > 0.95 * 125e6


def test_frames_are_larger_on_a_faster_link() -> None:
    sizes = []
    for rate in (1e6, 125e6, 250e6, 5e9):
        link = PlainLink(rate, 0.001)
        link.run(2.0)
        sizes.append(link.window.next_frame_bytes)
    assert sizes[:2] == [FRAME, FRAME]
    assert FRAME < sizes[2] < sizes[3] == 1024 * 1024


@settings(max_examples=25, deadline=None)
@example(before=[("busy", 37748736.0, 0.0625)], rate=2e6, round_trip_s=0.0625)
@given(
    before=st.lists(
        st.tuples(st.sampled_from(["busy", "idle", "broken"]), st.floats(2e6, 50e6), st.floats(0.0005, 0.08)),
        max_size=6,
    ),
    rate=st.floats(2e6, 50e6),
    round_trip_s=st.floats(0.0005, 0.08),
)
def test_whatever_a_link_has_been_it_is_filled_again_and_has_a_short_queue(
    before: list[tuple[str, float, float]], rate: float, round_trip_s: float
) -> None:
    link = PlainLink(rate, round_trip_s)
    for after, link.rate, link.round_trip_s in before:
        link.run(0.5)
        if after == "idle":
            link.drain()
            link.now += 3.0
        elif after == "broken":
            link.lose()
    link.rate, link.round_trip_s = rate, round_trip_s
    link.run(1.0 + 2 * PROBE_AFTER_S)
    assert link.run(3.0) > 0.9 * rate
    alone_s = round_trip_s + FRAME / rate
    assert link.window.size <= max(MIN_WINDOW_BYTES, rate * (1.5 * alone_s + 0.01) + 3 * FRAME)
