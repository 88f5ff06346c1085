"""Arrivals serve every conversation once, at moments that are theirs whatever the answers do."""

import asyncio
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.load.arrival import (
    Arrival,
    ClosedLoop,
    Constant,
    Gamma,
    Poisson,
    Ramp,
    Serve,
    Share,
    TraceTimes,
    drive,
    plan,
)
from kvrelay.load.workload import Conversation, Turn

CONVERSATIONS = [Conversation(str(n), (), (Turn((1,), 1, 1),)) for n in range(40)]


async def driven(arrival: Arrival, serve: Serve, conversations: list[Conversation] = CONVERSATIONS) -> None:
    await drive(arrival, conversations, serve, began=asyncio.get_running_loop().time())


@pytest.mark.parametrize("arrival", [ClosedLoop(4), ClosedLoop(100), Poisson(5000.0, 1)])
async def test_every_conversation_is_served_once(arrival: Arrival) -> None:
    served = []

    async def serve(conversation: Conversation, due_s: float) -> None:
        await asyncio.sleep(0)
        served.append(conversation.name)

    await driven(arrival, serve)
    assert sorted(served, key=int) == [str(n) for n in range(40)]


async def test_a_closed_loop_keeps_all_its_clients_busy_and_no_more() -> None:
    open_now, most = 0, []

    async def serve(conversation: Conversation, due_s: float) -> None:
        nonlocal open_now
        open_now += 1
        most.append(open_now)
        await asyncio.sleep(0)
        open_now -= 1

    await driven(ClosedLoop(3), serve)
    assert max(most) == 3


async def test_a_closed_loop_does_not_begin_before_the_runs_zero() -> None:
    loop = asyncio.get_running_loop()
    began, due, passed = loop.time() + 0.0004, [], []

    async def serve(conversation: Conversation, due_s: float) -> None:
        due.append(due_s)
        passed.append(max(0.0, loop.time() - began))

    await drive(ClosedLoop(3), CONVERSATIONS, serve, began=began)
    # uvloop's timers count whole milliseconds: this one fires at once, so that zero is due, unless the machine is busy.
    assert 0.0 <= due[0] <= passed[0]


async def test_poisson_arrivals_do_not_wait_for_answers() -> None:
    all_open, release = asyncio.Event(), asyncio.Event()
    open_now = 0

    async def serve(conversation: Conversation, due_s: float) -> None:
        nonlocal open_now
        open_now += 1
        if open_now == len(CONVERSATIONS):
            all_open.set()
        await release.wait()

    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        group.create_task(driven(Poisson(5000.0, 1), serve))
        await all_open.wait()
        release.set()


async def test_poisson_arrivals_have_the_rate_on_average() -> None:
    loop, moments = asyncio.get_running_loop(), []

    async def serve(conversation: Conversation, due_s: float) -> None:
        moments.append(loop.time())

    gap = 0.0
    for _ in range(3):  # the machine may be late, but not each time
        moments.clear()
        await driven(Poisson(200.0, 3), serve, [*CONVERSATIONS, *CONVERSATIONS])
        gap = (moments[-1] - moments[0]) / 79
        if gap <= 1.4 / 200:
            break
    assert gap == pytest.approx(1 / 200, rel=0.4)


async def test_an_error_of_one_ends_the_run() -> None:
    async def serve(conversation: Conversation, due_s: float) -> None:
        raise RuntimeError("no router")

    with pytest.raises(ExceptionGroup):
        await driven(ClosedLoop(2), serve)


def test_open_arrivals_have_their_rate_and_are_the_same_again() -> None:
    for arrival in (Poisson(50.0, 1), Gamma(50.0, 1, 0.5), Constant(50.0)):
        moments = list(itertools.islice(arrival.times(), 4000))
        assert moments == list(itertools.islice(arrival.times(), 4000))
        assert moments == sorted(moments)
        assert 4000 / moments[-1] == pytest.approx(50, rel=0.1)


def test_a_ramp_ends_at_its_last_rate() -> None:
    moments = list(itertools.islice(Ramp(1.0, 100.0, 10.0, 1).times(), 5000))
    first = sum(at < 1 for at in moments)
    late = sum(15 <= at < 20 for at in moments) / 5
    assert first < 15
    assert late == pytest.approx(100, rel=0.15)


def test_shares_of_an_arrival_add_up_to_the_whole() -> None:
    parts = [pair for number in range(3) for pair in plan(Constant(10.0), CONVERSATIONS, Share(number, 3))]
    assert sorted(parts, key=lambda pair: pair[0]) == list(plan(Constant(10.0), CONVERSATIONS))


OPEN = st.one_of(
    st.builds(Poisson, st.floats(0.1, 1e3), st.integers(0, 2**32)),
    st.builds(Gamma, st.floats(0.1, 1e3), st.integers(0, 2**32), st.floats(0.05, 20.0)),
    st.builds(Constant, st.floats(0.1, 1e3)),
    st.builds(Ramp, st.floats(0.0, 50.0), st.floats(0.1, 50.0), st.floats(0.1, 60.0), st.integers(0, 2**32)),
)


@given(OPEN, st.integers(1, 5))
def test_any_open_arrival_never_decreases_repeats_itself_and_splits_without_loss(
    arrival: Poisson | Gamma | Constant | Ramp, processes: int
) -> None:
    moments = list(itertools.islice(arrival.times(), 40))
    assert moments == sorted(moments) and moments[0] >= 0
    assert moments == list(itertools.islice(arrival.times(), 40))
    whole = list(plan(arrival, CONVERSATIONS))
    assert [at_s for at_s, _ in whole] == moments
    parts = [list(plan(arrival, CONVERSATIONS, Share(number, processes))) for number in range(processes)]
    assert sorted(itertools.chain(*parts), key=lambda pair: int(pair[1].name)) == whole


@pytest.mark.parametrize(("burstiness", "spread"), [(0.25, 2.0), (1.0, 1.0), (4.0, 0.5)])
def test_burstiness_is_the_gaps_shape(burstiness: float, spread: float) -> None:
    """A gamma distribution's coefficient of variation is 1/sqrt(shape)."""
    moments = list(itertools.islice(Gamma(10.0, 3, burstiness).times(), 20_000))
    gaps = np.diff(moments)
    assert float(np.std(gaps) / np.mean(gaps)) == pytest.approx(spread, rel=0.05)


@given(st.floats(0.0, 50.0), st.floats(0.5, 50.0), st.floats(1.0, 30.0), st.floats(0.0, 1.0))
def test_a_ramp_expects_as_many_arrivals_as_the_area_under_its_rate(
    low: float, high: float, ramp_s: float, part: float
) -> None:
    ramp, at_s = Ramp(low, high, ramp_s, 1), part * ramp_s
    expected = low * at_s + (high - low) / ramp_s * at_s**2 / 2
    if expected > 1e-6:
        assert ramp._when(expected) == pytest.approx(at_s, rel=1e-6)


def test_a_trace_keeps_its_own_times() -> None:
    traced = [Conversation(str(n), (), (Turn((1,), 1, 1),), at_s) for n, at_s in enumerate([0.0, 0.0, 2.5, 7.0])]
    assert [due_s for due_s, _ in plan(TraceTimes(), traced)] == [0.0, 0.0, 2.5, 7.0]


async def test_nothing_starts_after_the_duration() -> None:
    served = []

    async def serve(conversation: Conversation, due_s: float) -> None:
        served.append(due_s)

    loop = asyncio.get_running_loop()
    await drive(Constant(100.0), CONVERSATIONS, serve, began=loop.time(), duration_s=0.105)
    assert served == pytest.approx([n / 100 for n in range(11)])
