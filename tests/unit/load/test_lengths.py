"""Numbers follow the distribution that the text asked for."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.load.ids import dice
from kvrelay.load.lengths import Lengths, Spreading


@given(st.integers(0, 2**32), st.integers(1, 10_000), st.integers(0, 10_000))
def test_uniform_lengths_stay_between_their_ends(seed: int, low: int, more: int) -> None:
    lengths = Lengths.parse(f"{low}-{low + more}")
    chance = dice(seed, "test")
    assert all(low <= lengths.draw(chance) <= low + more for _ in range(50))


def test_both_ends_of_a_range_are_drawn() -> None:
    chance = dice(1, "test")
    assert {Lengths(3, 5).draw(chance) for _ in range(200)} == {3, 4, 5}


def test_a_lognormal_has_its_median_and_its_spread_and_no_more_than_its_maximum() -> None:
    chance = dice(1, "test")
    free, capped = Lengths.parse("lognormal:300:0.8"), Lengths.parse("lognormal:300:0.8:1000")
    drawn = [free.draw(chance) for _ in range(4000)]
    assert float(np.median(drawn)) == pytest.approx(300, rel=0.05)
    assert float(np.std(np.log(drawn))) == pytest.approx(0.8, rel=0.05)
    assert max(capped.draw(chance) for _ in range(4000)) == 1000


@given(st.integers(0, 2**32))
def test_spreadings_are_never_negative(seed: int) -> None:
    chance = dice(seed, "test")
    for text in ("0-0.5", "0.2", "lognormal:0.5:2", "lognormal:1:1:3"):
        assert 0 <= Spreading.parse(text).draw(chance) < math.inf


@pytest.mark.parametrize(
    "text", ["", "x", "-1", "2-1", "nan", "inf", "1-inf", "lognormal:1", "lognormal:1:-1", "lognormal:1:nan",
             "lognormal:inf:1", "lognormal:3:1:2", "lognormal:1:1:1:1"],
)  # fmt: skip
def test_what_is_no_distribution_is_refused_by_name(text: str) -> None:
    for kind in (Spreading, Lengths):
        with pytest.raises(ValueError, match=f"^{text}:"):
            kind.parse(text)


@pytest.mark.parametrize("text", ["0", "0-3", "1.5", "1-2.5", "1e12", "lognormal:0.5:1"])
def test_lengths_are_whole_and_at_least_one(text: str) -> None:
    with pytest.raises(ValueError, match="whole numbers"):
        Lengths.parse(text)
