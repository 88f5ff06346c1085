"""Equal, or nearly a tie, or different."""

import pytest

from kvrelay.cli.demo.verdict import Verdict, compare


def test_equal_answers_match_without_a_margin() -> None:
    assert compare([1, 2], (1, 2), (0.0, 0.0)) == Verdict(True)


def test_a_first_difference_at_a_near_tie_matches_and_shows_its_margin() -> None:
    assert compare([1, 3, 9], (1, 2, 4), (1.0, 5e-4, 1.0)) == Verdict(True, 5e-4, 1)


def test_a_first_difference_with_a_clear_choice_does_not_match_whatever_follows() -> None:
    assert compare([1, 3, 9], (1, 2, 4), (0.0, 0.5, 0.0)) == Verdict(False, 0.5, 1)


@pytest.mark.parametrize(("ids", "reference"), [([1], [1, 2]), ([1, 2], [1]), ([], [1])])
def test_an_answer_that_is_too_short_or_too_long_never_matches(ids: list[int], reference: list[int]) -> None:
    assert not compare(ids, reference, [0.0] * len(reference)).matches
