"""The sampler against a naive one, its distribution, and its independence of everything but its arguments."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.engine import noise
from kvrelay.engine.sampler import candidates, decide, is_plain_greedy, penalized
from kvrelay.types import Sampling

VOCAB = 24
PLAIN = Sampling(seed=1, max_tokens=100)
GREEDY = dataclasses.replace(PLAIN, temperature=0.0)

logit_rows = st.lists(st.integers(-12, 12).map(lambda n: n / 4), min_size=VOCAB, max_size=VOCAB)  # with ties
id_lists = st.lists(st.integers(0, VOCAB - 1), max_size=12)
samplings = st.builds(
    Sampling,
    seed=st.integers(0, 2**64 - 1),
    max_tokens=st.just(100),
    temperature=st.sampled_from([0.0, 0.01, 0.5, 1.0, 3.0]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 1e-6]),
    top_k=st.sampled_from([0, 1, 2, 5, VOCAB - 1, VOCAB, VOCAB + 9]),
    min_p=st.sampled_from([0.0, 1e-9, 0.05, 0.5, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.7, -0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.3, -0.3]),
    min_tokens=st.sampled_from([0, 3]),
    stop_token_ids=st.sampled_from([(), (3, 7)]),
)


def naive_scores(logits: list[float], sampling: Sampling, prompt: list[int], output: list[int]) -> list[float]:
    scores = list(logits)
    for token in set(prompt) | set(output):
        penalty = sampling.repetition_penalty
        scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
    for token in set(output):
        scores[token] -= sampling.presence_penalty + sampling.frequency_penalty * output.count(token)
    if len(output) < sampling.min_tokens:
        for token in (0, *sampling.stop_token_ids):
            scores[token] = -math.inf
    return scores


def naive_candidates(scores: list[float], sampling: Sampling) -> list[int]:
    """Sorts everything, drops from the end."""
    z = [(score - max(scores)) / sampling.temperature for score in scores]
    order = sorted(range(len(z)), key=lambda token: (-z[token], token))
    if sampling.top_k:
        order = order[: sampling.top_k]
    if sampling.top_p < 1:
        total, mass, kept = sum(math.exp(z[token]) for token in order), 0.0, []
        for token in order:
            kept.append(token)
            mass += math.exp(z[token]) / total
            if mass >= sampling.top_p - 1e-12:
                break
        order = kept
    if sampling.min_p:
        order = [token for token in order if z[token] >= math.log(sampling.min_p)]
    return order


def naive_draw(scores: list[float], sampling: Sampling, index: int) -> int:
    if sampling.temperature == 0:
        return scores.index(max(scores))
    ids = naive_candidates(scores, sampling)
    z = {token: (scores[token] - max(scores)) / sampling.temperature for token in ids}
    bits = noise.bits(sampling.seed, index, np.arange(len(scores), dtype=np.uint64))
    return max(ids, key=lambda token: (z[token] + float(noise.gumbel(bits[token : token + 1])[0]), -token))


@settings(deadline=None)
@given(logit_rows, samplings, id_lists, id_lists)
def test_a_decision_equals_the_naive_one(
    logits: list[float], sampling: Sampling, prompt: list[int], output: list[int]
) -> None:
    scores = naive_scores(logits, sampling, prompt, output)
    got = penalized(np.array(logits), sampling, prompt, output, len(output), (0,))
    np.testing.assert_allclose(got, scores, rtol=1e-12)
    if sampling.temperature:
        ids, z = candidates(got, sampling)
        assert sorted(ids.tolist()) == sorted(naive_candidates(got.tolist(), sampling))
        assert z.max() == 0 and len(z) == len(ids)
    drawn = decide(np.array(logits), sampling, prompt, output, len(output), (0,))
    assert drawn.token == naive_draw(got.tolist(), sampling, len(output))


@given(st.integers(0, 2**64 - 1), st.sampled_from([0.2, 1.0, 30.0]), st.floats(0.5, 8))
@settings(max_examples=40, deadline=None)
def test_leaving_hopeless_candidates_out_changes_no_draw_of_a_large_vocabulary(
    seed: int, temperature: float, spread: float
) -> None:
    logits = np.random.default_rng(seed).normal(0, spread, 9000)
    sampling = Sampling(seed=seed, max_tokens=9, temperature=temperature)
    for index in range(5):
        perturbed = logits / temperature + noise.gumbel(noise.bits(seed, index, noise.all_ids(9000)))
        assert decide(logits, sampling, [], [0] * index, index).token == perturbed.argmax()


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999])
def test_the_nucleus_of_a_large_vocabulary_is_the_naive_one(top_p: float) -> None:
    logits = np.random.default_rng(5).normal(0, 2, 3000)
    sampling = dataclasses.replace(PLAIN, top_p=top_p)
    ids, _ = candidates(logits, sampling)
    assert sorted(ids.tolist()) == sorted(naive_candidates(logits.tolist(), sampling))


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    assert decide(np.array([1.0, 5.0, 5.0, 2.0]), GREEDY, [], [], 0).token == 1


def test_top_k_takes_the_lowest_of_equal_ids() -> None:
    ids, _ = candidates(np.array([2.0, 1.0, 2.0, 2.0, 0.0]), dataclasses.replace(PLAIN, top_k=2))
    assert sorted(ids.tolist()) == [0, 2]


def test_neither_float32_logits_nor_repeated_calls_change_a_draw() -> None:
    logits = np.random.default_rng(0).normal(0, 2, 500).astype(np.float32)
    tokens = {decide(row, PLAIN, [1], [2, 3], 2).token for row in (logits, logits.astype(np.float64)) for _ in range(3)}
    assert len(tokens) == 1


@pytest.mark.parametrize("change", [{"seed": 2}, {"temperature": 0.7}, {"top_k": 40}, {"top_p": 0.8}, {"min_p": 0.02}])
def test_draws_follow_softmax_of_what_the_filters_leave(change: dict[str, Any]) -> None:
    sampling = dataclasses.replace(PLAIN, **change)
    logits = np.random.default_rng(7).normal(0, 1.5, 60)
    ids, z = candidates(logits, sampling)
    expected = np.zeros(60)
    expected[ids] = np.exp(z) / np.exp(z).sum()
    draws = 20_000
    counts = np.bincount([decide(logits, sampling, [], [], index).token for index in range(draws)], minlength=60)
    assert not counts[expected == 0].any()
    likely = expected * draws >= 5
    chi_square = float((((counts - expected * draws) ** 2)[likely] / (expected[likely] * draws)).sum())
    freedom = int(likely.sum())
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom)


def test_noise_is_uniform_over_seeds_indexes_and_ids_and_never_0_or_1() -> None:
    few = noise.all_ids(64)
    for values in (
        np.concatenate([noise.uniform(noise.bits(seed, 0, few)) for seed in range(500)]),
        np.concatenate([noise.uniform(noise.bits(9, index, few)) for index in range(500)]),
        noise.uniform(noise.bits(2**64 - 1, 2**31, noise.all_ids(32_000))),
    ):
        assert values.min() > 0 and values.max() < 1
        counts, _ = np.histogram(values, bins=50, range=(0, 1))
        assert abs(counts - len(values) / 50).max() < 6 * math.sqrt(len(values) / 50)
    extremes = noise.uniform(np.array([0, 2**52 - 1], dtype=np.uint64))
    assert (
        extremes[0] > 0
        and extremes[1] < 1
        and np.isfinite(noise.gumbel(np.array([0, 2**52 - 1], dtype=np.uint64))).all()
    )


def test_noise_of_neighbouring_indexes_and_seeds_is_uncorrelated() -> None:
    ids = noise.all_ids(20_000)
    rows = [noise.uniform(noise.bits(seed, index, ids)) for seed, index in [(0, 0), (0, 1), (1, 0), (1, 1)]]
    correlations = np.corrcoef(rows) - np.eye(4)
    assert abs(correlations).max() < 0.04


@settings(deadline=None)
@given(logit_rows, id_lists, st.integers(0, 30))
def test_logprobs_are_of_raw_logits_best_first(logits: list[float], output: list[int], top: int) -> None:
    sampling = dataclasses.replace(PLAIN, logprobs=top, temperature=0.3, top_k=2, presence_penalty=1.5)
    drawn = decide(np.array(logits), sampling, [], output, len(output))
    total = math.log(sum(math.exp(one) for one in logits))
    assert drawn.logprobs is not None
    assert math.isclose(drawn.logprobs.chosen, logits[drawn.token] - total, abs_tol=1e-12)
    expected = sorted(range(VOCAB), key=lambda token: (-logits[token], token))[:top]
    assert [token for token, _ in drawn.logprobs.top] == expected
    assert all(math.isclose(value, logits[token] - total, abs_tol=1e-12) for token, value in drawn.logprobs.top)


def test_no_logprobs_unless_asked_and_0_means_the_chosen_one_only() -> None:
    logits = np.arange(5.0)
    assert decide(logits, GREEDY, [], [], 0).logprobs is None
    zero = decide(logits, dataclasses.replace(GREEDY, logprobs=0), [], [], 0).logprobs
    assert zero is not None and zero.top == ()


def test_if_every_token_would_end_the_answer_min_tokens_gives_way() -> None:
    sampling = dataclasses.replace(PLAIN, min_tokens=5, stop_token_ids=(0, 1, 2))
    assert decide(np.zeros(3), sampling, [], [], 0).token in (0, 1, 2)


@pytest.mark.parametrize(
    "change", [{"repetition_penalty": 1e-300}, {"temperature": 1e-300}, {"repetition_penalty": 1e300}]
)
def test_extreme_parameters_still_give_a_token(change: dict[str, Any]) -> None:
    drawn = decide(np.array([3.0, -2.0, 1.0]), dataclasses.replace(PLAIN, **change, top_p=0.9), [0, 1], [2], 1)
    assert 0 <= drawn.token < 3


def test_logits_that_are_not_finite_are_an_error_and_not_a_token() -> None:
    with pytest.raises(ArithmeticError, match="index 4"):
        decide(np.array([1.0, math.nan]), PLAIN, [], [0] * 4, 4)


@pytest.mark.parametrize(
    "change",
    [{"temperature": 1.0}, {"logprobs": 0}, {"min_tokens": 9}, {"repetition_penalty": 1.1}, {"presence_penalty": 1}],
)
def test_only_an_argmax_of_raw_logits_is_plain_greedy(change: dict[str, Any]) -> None:
    assert is_plain_greedy(GREEDY, 3)
    assert not is_plain_greedy(dataclasses.replace(GREEDY, **change), 3)
