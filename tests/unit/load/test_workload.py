"""Conversations are a pure function of the seed, and share exactly what they should."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.load.hits import HitRates, SharedPrefixes
from kvrelay.load.ids import FIRST_ID, dice
from kvrelay.load.lengths import Lengths


def workload(**changes: object) -> SharedPrefixes:
    settings: dict[str, object] = {
        "seed": 7,
        "vocab_size": 256,
        "count": 50,
        "hits": HitRates.parse("0.9:3,0.5:1,0:1"),
        "prompt_tokens": Lengths(20, 200),
        "output_tokens": Lengths(1, 9),
    }
    return SharedPrefixes(**(settings | changes))  # type: ignore[arg-type]


def test_the_same_seed_gives_the_same_conversations_and_another_seed_others() -> None:
    assert list(workload().conversations()) == list(workload().conversations())
    assert list(workload().conversations()) != list(workload(seed=8).conversations())


@given(seed=st.integers(0, 2**32), turns=st.integers(1, 3), documents=st.integers(1, 5))
def test_every_opening_is_the_beginning_of_a_warmed_document(seed: int, turns: int, documents: int) -> None:
    made = workload(seed=seed, turns=turns, documents=documents, count=10)
    warm = [document.opening_ids for document in made.warm_up()]
    for conversation in made.conversations():
        opening = conversation.opening_ids
        assert any(document[: len(opening)] == opening for document in warm)
        assert 20 <= len(opening) + len(conversation.turns[0].fresh_ids) <= 200
        assert len(conversation.turns) == turns


def test_first_prompts_hit_the_drawn_share() -> None:
    shares = set()
    for conversation in workload(prompt_tokens=Lengths(100, 100)).conversations():
        shares.add(len(conversation.opening_ids))
    assert shares == {0, 50, 90}


@given(seed=st.integers(0, 2**32), vocab=st.integers(64, 200_000))
def test_ids_keep_away_from_both_ends_of_the_vocabulary(seed: int, vocab: int) -> None:
    for conversation in workload(seed=seed, vocab_size=vocab, count=3).conversations():
        ids = conversation.opening_ids + conversation.turns[0].fresh_ids
        assert all(FIRST_ID <= token < vocab * 0.9 for token in ids)


def test_nothing_is_warmed_when_nothing_is_shared() -> None:
    assert workload(hits=HitRates.parse("0")).warm_up() == []


def test_hit_rates_are_read_with_their_weights() -> None:
    hits = HitRates.parse("0.97:75,0.8:20,0:5")
    assert hits.mean == pytest.approx(0.97 * 0.75 + 0.8 * 0.2)
    assert HitRates.parse("0.5").draw(dice(1, "hits")) == 0.5


@pytest.mark.parametrize("text", ["1", "1.5:3", "0.5:0", "-0.1", "x", "0.5:y", ""])
def test_hit_rates_out_of_range_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        HitRates.parse(text)


@pytest.mark.parametrize("text", ["0", "9-3", "x", "-5", ""])
def test_lengths_out_of_range_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Lengths.parse(text)


def test_a_length_may_be_one_number_or_a_range() -> None:
    assert Lengths.parse("512") == Lengths(512, 512)
    assert Lengths.parse("128-512") == Lengths(128, 512)
