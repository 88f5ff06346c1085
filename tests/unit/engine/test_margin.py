"""The margin: a change smaller than it never changes the draw; a targeted change slightly larger does."""

import dataclasses

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvrelay.engine.margin import margin
from kvrelay.engine.sampler import decide
from kvrelay.types import Sampling

samplings = st.builds(
    Sampling,
    seed=st.integers(0, 10_000),
    max_tokens=st.just(9),
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    top_p=st.sampled_from([1.0, 0.9, 0.4]),
    top_k=st.sampled_from([0, 1, 4]),
    min_p=st.sampled_from([0.0, 0.2]),
)


@given(samplings, st.integers(0, 10_000), st.integers(0, 50))
@example(Sampling(seed=495, max_tokens=9, temperature=0.7, top_p=0.4, top_k=4), 40, 0)
@settings(max_examples=150, deadline=None)
def test_changes_well_below_the_margin_never_change_the_draw(sampling: Sampling, data: int, index: int) -> None:
    rng = np.random.default_rng(data)
    logits = rng.normal(0, 2, 30)
    distance = margin(logits, sampling, [], [], index)
    assert distance >= 0
    token = decide(logits, sampling, [], [], index).token
    scale = distance * (sampling.temperature or 1.0) / 5
    for _ in range(5):
        moved = logits + rng.uniform(-scale, scale, len(logits))
        assert decide(moved, sampling, [], [], index).token == token


@pytest.mark.parametrize("change", [{"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.3}])
def test_somewhere_a_near_tie_is_found_and_lies_within_its_margin(change: dict[str, float]) -> None:
    sampling = dataclasses.replace(Sampling(seed=4, max_tokens=9), **change)  # type: ignore[arg-type]
    rng = np.random.default_rng(1)
    flips = []
    for index in range(3000):
        logits = rng.normal(0, 1, 12)
        noisy = logits + rng.uniform(-2e-2, 2e-2, len(logits))
        if decide(noisy, sampling, [], [], index).token != decide(logits, sampling, [], [], index).token:
            flips.append(margin(logits, sampling, [], [], index))
    assert flips
    assert max(flips) < 1e-1


def test_greedy_margin_is_the_gap_of_the_two_best() -> None:
    sampling = Sampling(seed=0, max_tokens=1, temperature=0.0)
    assert margin(np.array([1.0, 4.0, 3.5]), sampling, [], [], 0) == 0.5
