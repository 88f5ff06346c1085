"""Which answers are compared, and how far."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.cli.load.check import choose, judged, sampling_of
from kvrelay.load.record import Record
from kvrelay.proto.v1 import common_pb2

IDS, MARGINS = (40, 41, 42, 43), (0.5, 0.4, 0.3, 0.2)


def record(ids: tuple[int, ...], outcome: str = "ok", **more: Any) -> Record:
    return Record("c", 0, outcome, ids=ids, **more)


def test_an_equal_answer_matches() -> None:
    checked = judged(record(IDS), IDS, MARGINS)
    assert (checked.matches, checked.first_difference, checked.margin) == (True, None, None)


@pytest.mark.parametrize("index", range(4))
def test_the_first_difference_is_told_with_its_margin(index: int) -> None:
    ids = tuple(token + (at >= index) for at, token in enumerate(IDS))
    checked = judged(record(ids), IDS, MARGINS)
    assert (checked.matches, checked.first_difference, checked.margin) == (False, index, MARGINS[index])


def test_a_near_tie_matches_and_is_told() -> None:
    checked = judged(record((40, 99)), IDS, (0.5, 1e-4, 0.3, 0.2))
    assert (checked.matches, checked.first_difference, checked.margin) == (True, 1, 1e-4)


@pytest.mark.parametrize("outcome", ["cancelled", "unfinished", "failed"])
def test_an_answer_that_was_cut_need_only_be_a_beginning(outcome: str) -> None:
    assert judged(record(IDS[:2], outcome), IDS, MARGINS).matches is True
    assert judged(record((40, 99), outcome), IDS, MARGINS).first_difference == 1
    assert judged(record(IDS[:2]), IDS, MARGINS).matches is False


@pytest.mark.parametrize("outcome", ["ok", "cancelled"])
def test_an_answer_that_goes_on_beyond_the_reference_is_wrong(outcome: str) -> None:
    checked = judged(record((*IDS, 44), outcome), IDS, MARGINS)
    assert (checked.matches, checked.first_difference) == (False, 4)


@given(st.integers(0, 200), st.integers(1, 50))
def test_at_most_so_many_are_chosen_spread_evenly(count: int, limit: int) -> None:
    chosen = choose(range(count), limit)
    assert len(chosen) == min(count, limit) == len(set(chosen))
    assert chosen == sorted(chosen)
    if count > limit:
        gaps = [after - before for before, after in zip(chosen, chosen[1:], strict=False)]
        assert not gaps or max(gaps) - min(gaps) <= 1


def test_sampling_is_what_was_sent() -> None:
    wanted = common_pb2.Sampling(temperature=0.5, ignore_eos=True)
    how = sampling_of(record(IDS, seed=9, wanted_tokens=20, prompt_tokens=7), wanted)
    assert (how.seed, how.max_tokens, how.temperature, how.ignore_eos) == (9, 20, 0.5, True)
    assert sampling_of(record(IDS, wanted_tokens=1), common_pb2.Sampling()).temperature == 1.0
