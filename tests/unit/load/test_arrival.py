"""Closed loop and Poisson arrivals serve every conversation once."""

import asyncio
import itertools

import pytest

from kvrelay.load.arrival import Arrival, ClosedLoop, Constant, Gamma, Poisson, Ramp, Serve, Share, drive, plan
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

    await driven(Poisson(200.0, 3), serve, [*CONVERSATIONS, *CONVERSATIONS])
    assert (moments[-1] - moments[0]) / 79 == pytest.approx(1 / 200, rel=0.4)


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
