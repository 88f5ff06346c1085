"""How near a draw was to another outcome. Knows the sampler's rules; used to judge near-ties, never to draw."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvrelay.engine import noise
from kvrelay.engine.noise import Floats
from kvrelay.engine.sampler import penalized, ranked, scaled
from kvrelay.types import Sampling

_TINY = float(np.finfo(np.float64).tiny)
"""Keeps a token that ties with the last one inside outside."""


def margin(
    logits: NDArray[np.floating],
    sampling: Sampling,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    index: int,
    eos_token_ids: Sequence[int] = (),
) -> float:
    """The least change of a perturbed logit, or of a distance to a top-k/p/min-p cut, that gives another token.

    In units of logits over temperature (greedy: of logits), for top_p of probability. Arguments as for `decide`.
    """
    raw = np.asarray(logits, dtype=np.float64)
    scores = penalized(raw, sampling, prompt_ids, output_ids, index, eos_token_ids)
    if len(scores) < 2:
        return math.inf
    if sampling.temperature == 0:
        second, best = np.partition(scores, len(scores) - 2)[-2:]
        return float(best - second)
    z = scaled(scores, sampling.temperature)
    perturbed = z + noise.gumbel(noise.bits(sampling.seed, index, noise.all_ids(len(z))))
    slack = _slack(z, sampling)
    winner = int(np.where(slack >= 0, perturbed, -math.inf).argmax())
    behind = perturbed[winner] - perturbed
    # An excluded one must both get in and win; one that is in only has to win.
    cost = np.maximum(behind, np.where(slack >= 0, behind, -slack))
    cost[winner] = slack[winner]
    return float(cost.min())


def _slack(z: Floats, sampling: Sampling) -> Floats:
    """How far each token is inside (>= 0) or outside (< 0) of the nearest cut."""
    order = ranked(z, noise.all_ids(len(z)))
    sorted_z = z[order]
    inside = np.full(len(z), math.inf)
    k = sampling.top_k if 0 < sampling.top_k < len(z) else len(z)
    if k < len(z):
        inside = _rank_distance(sorted_z, k)
    if sampling.top_p < 1:
        mass = np.cumsum(np.exp(sorted_z)) / np.exp(sorted_z[:k]).sum()
        room = sampling.top_p - np.concatenate(([0.0], mass[:-1]))
        inside = np.minimum(inside, np.where(room > 0, _way_out(sorted_z, room), -_way_in(sorted_z, room)))
    if sampling.min_p > 0:
        inside = np.minimum(inside, sorted_z - math.log(sampling.min_p))
    slack = np.empty(len(z))
    slack[order] = inside
    return slack


def _way_in(sorted_z: Floats, room: Floats) -> Floats:
    """What it costs a token to be kept by top_p: it climbs to a rank, and the mass before that falls below the cut.

    The lower the rank, the less there is to climb and the more mass is in the way: best is where both are equal.
    """
    need = np.maximum(-room, _TINY)
    rank = np.searchsorted(need - sorted_z, -sorted_z)
    climb = np.where(rank > 0, sorted_z[rank - 1] - sorted_z, math.inf)
    return np.minimum(need[rank], climb)


def _way_out(sorted_z: Floats, room: Floats) -> Floats:
    """What it costs a token to be cut off by top_p: it falls to a rank, and the mass before that reaches the cut."""
    left = np.maximum(room, 0.0)
    rank = np.searchsorted(-sorted_z - left, -sorted_z)
    fall = np.where(rank < len(sorted_z), sorted_z - sorted_z[np.minimum(rank, len(sorted_z) - 1)], math.inf)
    return np.minimum(left[rank - 1], fall)


def _rank_distance(sorted_z: Floats, kept: int) -> Floats:
    """How far each token is inside or outside of the `kept` best: to change places, logits must meet across the cut."""
    if kept >= len(sorted_z):
        return np.full(len(sorted_z), math.inf)
    inside = sorted_z[:kept] - sorted_z[kept]
    outside = np.minimum(sorted_z[kept:] - sorted_z[kept - 1], -_TINY)
    return np.concatenate((inside, outside))
