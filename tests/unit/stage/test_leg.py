"""Walks every state and every input of the leg's table."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.errors import ProtocolViolation
from kvrelay.stage.leg import MESSAGES, TABLE, TERMINAL, Action, Input, Leg, State

STATES = [state for state in State if state not in TERMINAL]
HELD = {State.QUEUED, State.LOADING, State.LOADED, State.PREPARING, State.READY, State.EXTENDING}


def leg_in(state: State) -> Leg:
    leg = Leg()
    leg.state = state
    return leg


@pytest.mark.parametrize(("state", "what"), list(itertools.product(STATES, Input)), ids=str)
def test_every_input_in_every_state_moves_on_or_is_refused_and_changes_nothing(state: State, what: Input) -> None:
    leg = leg_in(state)
    step = TABLE.get((state, what))
    if step is not None:
        assert leg.take(what, first_index=0, ids=3) == step.actions
        assert (leg.state, leg.next_index) == (step.state, 3)
    elif what in MESSAGES:
        with pytest.raises(ProtocolViolation, match=f"{what}.*{state}"):
            leg.take(what, first_index=0, ids=3)
        assert (leg.state, leg.next_index) == (state, 0)
    else:
        with pytest.raises(AssertionError):
            leg.take(what)


@pytest.mark.parametrize("state", STATES, ids=str)
def test_stop_is_allowed_in_every_state_and_ends_the_leg_at_once_unless_it_decodes(state: State) -> None:
    leg = leg_in(state)
    leg.take(Input.STOP)
    assert leg.state is (State.STOPPING if state in {State.DECODING, State.STOPPING} else State.STOPPED)


@pytest.mark.parametrize("state", STATES, ids=str)
def test_a_second_open_leg_is_refused_in_every_state(state: State) -> None:
    with pytest.raises(ProtocolViolation, match="OpenLeg"):
        leg_in(state).take(Input.OPEN)


@pytest.mark.parametrize(
    ("what", "allowed"),
    [
        (Input.EXTEND, {State.READY}),
        (Input.EXTEND_FINAL, HELD),
        (Input.RESUME, HELD),
        (Input.STOP, set(STATES)),
    ],
    ids=str,
)
def test_messages_are_allowed_where_the_protocol_says(what: Input, allowed: set[State]) -> None:
    assert {state for state in STATES if (state, what) in TABLE} == allowed


def test_terminal_states_take_nothing_and_are_reached_only_with_their_last_event() -> None:
    last = {
        State.FINISHED: Action.SEND_FINISHED,
        State.STOPPED: Action.SEND_STOPPED,
        State.DRAINED: Action.SEND_DRAINED,
    }
    assert not [key for key in TABLE if key[0] in TERMINAL]
    for step in TABLE.values():
        assert (
            (step.actions[-1:] == (last[step.state],))
            if step.state in last
            else not set(last.values()) & {*step.actions}
        )


def test_tokens_go_out_only_after_ready() -> None:
    for (state, _), step in TABLE.items():
        if {Action.SEND_TOKENS, Action.SEND_PAUSED, Action.SEND_FINISHED} & {*step.actions}:
            assert state in {State.DECODING, State.STOPPING} or step.actions[0] is Action.SEND_READY


@pytest.mark.parametrize("order", [(Input.COMMITTED, Input.RESUME), (Input.RESUME, Input.COMMITTED)], ids=str)
def test_ready_waits_for_no_step_once_both_the_kv_and_resume_are_here(order: tuple[Input, Input]) -> None:
    leg = leg_in(State.LOADING)
    assert Action.SEND_READY not in leg.take(order[0])
    assert leg.take(order[1])[-1] is Action.SEND_READY
    assert leg.state is State.DECODING


@pytest.mark.parametrize("what", [Input.EXTEND, Input.EXTEND_FINAL, Input.RESUME], ids=str)
def test_ids_that_do_not_start_at_the_next_index_are_refused_with_both_values(what: Input) -> None:
    leg = leg_in(State.READY)
    leg.next_index = 4
    with pytest.raises(ProtocolViolation, match="first_index 3.*next index is 4"):
        leg.take(what, first_index=3, ids=2)
    assert (leg.state, leg.next_index) == (State.READY, 4)


def test_caught_up_before_the_ids_of_a_final_extend_does_not_drain() -> None:
    leg = leg_in(State.PREPARING)
    leg.take(Input.EXTEND_FINAL, first_index=0, ids=5)
    assert leg.caught_up(0) == ()
    assert leg.caught_up(5) == (Action.SEND_DRAINED,)
    assert leg.ended


@given(st.lists(st.sampled_from(list(Input)), max_size=30))
def test_on_any_path_opened_ready_and_the_last_event_are_sent_at_most_once(inputs: list[Input]) -> None:
    leg, sent = Leg(), []
    for what in inputs:
        if (leg.state, what) in TABLE:
            sent += leg.take(what)
    once = [Action.SEND_FINISHED, Action.SEND_STOPPED, Action.SEND_DRAINED]
    assert sum(sent.count(action) for action in once) == leg.ended
    assert sent.count(Action.SEND_READY) <= 1
