"""Lanes are opened again soon, then seldom, and not for ever."""

from kvrelay.transfer.patience import LONGEST_WAIT_S, MOST_BARREN, Patience


def test_the_first_try_is_at_once_and_later_ones_wait_longer_up_to_a_second() -> None:
    patience = Patience(30.0)
    waits = [patience.broke(0.0) for _ in range(9)]
    assert waits[:4] == [0.0, 0.05, 0.1, 0.2]
    assert waits[-1] == LONGEST_WAIT_S


def test_a_peer_out_of_reach_is_given_up_after_the_limit() -> None:
    patience = Patience(30.0)
    assert patience.broke(100.0) is not None
    assert patience.broke(129.0) is not None
    assert patience.broke(131.0) is None


def test_an_answer_starts_the_limit_anew() -> None:
    patience = Patience(30.0)
    patience.broke(100.0)
    patience.answered()
    assert patience.broke(200.0) is not None
    assert patience.broke(229.0) is not None


def test_a_lane_that_opens_but_never_moves_a_frame_is_given_up() -> None:
    patience = Patience(30.0)
    for _ in range(MOST_BARREN):
        patience.answered()
        assert patience.broke(0.0) is not None
    patience.answered()
    assert patience.broke(0.0) is None


def test_an_acknowledged_frame_forgives_what_was_before() -> None:
    patience = Patience(30.0)
    for _ in range(3 * MOST_BARREN):
        patience.answered()
        patience.moved()
        assert patience.broke(0.0) == 0.0
