"""The stage's door."""

import asyncio

import pytest

from kvrelay.errors import Overloaded
from kvrelay.stage.intake import Intake


async def test_leases_of_one_request_have_sequence_ids_of_their_own() -> None:
    intake = Intake("m1")
    with intake.enter("r") as one, intake.enter("r") as two:
        assert one.sequence_id != two.sequence_id
        one.state = "READY"
        assert intake.states() == {"READY": 1, "OPENING": 1}
    assert intake.leftovers() == {"leases": 0, "releases": 0}


async def test_a_shut_door_names_the_stage_and_empties() -> None:
    intake = Intake("m1")
    with intake.enter("r"):
        intake.shut()
        with pytest.raises(Overloaded, match="m1 is draining"):
            with intake.enter("s"):
                pass
        emptied = asyncio.ensure_future(intake.empty())
        await asyncio.sleep(0)
        assert not emptied.done()
    await emptied


async def test_a_release_goes_on_when_its_caller_is_cancelled_and_is_counted_until_it_ends() -> None:
    intake, may_end = Intake("m1"), asyncio.Event()
    released = []

    async def release() -> None:
        await may_end.wait()
        released.append(True)

    async def call() -> None:
        with intake.enter("r"):
            try:
                await asyncio.Event().wait()
            finally:
                await intake.release(release())

    task = asyncio.ensure_future(call())
    for _ in range(2):  # the second one hits the release itself
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert intake.leftovers() == {"leases": 0, "releases": 1}
    may_end.set()
    await intake.empty()
    assert released == [True]
    assert intake.leftovers() == {"leases": 0, "releases": 0}


async def test_every_watcher_hears_of_a_change() -> None:
    intake = Intake("m1")
    with intake.watch() as one, intake.watch() as two:
        with intake.enter("r"):
            assert one.is_set() and two.is_set()
            one.clear()
        assert one.is_set()
