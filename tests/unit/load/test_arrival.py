"""Closed loop and Poisson arrivals serve every conversation once."""

import asyncio

import pytest

from kvrelay.load.arrival import Arrival, ClosedLoop, Poisson
from kvrelay.load.workload import Conversation, Turn

CONVERSATIONS = [Conversation(str(n), (), (Turn((1,), 1, 1),)) for n in range(40)]


@pytest.mark.parametrize("arrival", [ClosedLoop(4), ClosedLoop(100), Poisson(5000.0, 1)])
async def test_every_conversation_is_served_once(arrival: Arrival) -> None:
    served = []

    async def serve(conversation: Conversation) -> None:
        await asyncio.sleep(0)
        served.append(conversation.name)

    await arrival.drive(CONVERSATIONS, serve)
    assert sorted(served, key=int) == [str(n) for n in range(40)]


async def test_a_closed_loop_keeps_all_its_clients_busy_and_no_more() -> None:
    open_now, most = 0, []

    async def serve(conversation: Conversation) -> None:
        nonlocal open_now
        open_now += 1
        most.append(open_now)
        await asyncio.sleep(0)
        open_now -= 1

    await ClosedLoop(3).drive(CONVERSATIONS, serve)
    assert max(most) == 3


async def test_poisson_arrivals_do_not_wait_for_answers() -> None:
    all_open, release = asyncio.Event(), asyncio.Event()
    open_now = 0

    async def serve(conversation: Conversation) -> None:
        nonlocal open_now
        open_now += 1
        if open_now == len(CONVERSATIONS):
            all_open.set()
        await release.wait()

    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        group.create_task(Poisson(5000.0, 1).drive(CONVERSATIONS, serve))
        await all_open.wait()
        release.set()


async def test_poisson_arrivals_have_the_rate_on_average() -> None:
    loop, moments = asyncio.get_running_loop(), []

    async def serve(conversation: Conversation) -> None:
        moments.append(loop.time())

    await Poisson(200.0, 3).drive([*CONVERSATIONS, *CONVERSATIONS], serve)
    assert (moments[-1] - moments[0]) / 79 == pytest.approx(1 / 200, rel=0.4)


async def test_an_error_of_one_ends_the_run() -> None:
    async def serve(conversation: Conversation) -> None:
        raise RuntimeError("no router")

    with pytest.raises(ExceptionGroup):
        await ClosedLoop(2).drive(CONVERSATIONS, serve)
