"""Draws one token: a pure function of logits, ids, index and parameters. Knows no sequence, no batch, no device.

Order as in the field: penalties, masks of min_tokens, temperature, top_k, top_p, min_p; then Gumbel noise over what is
left.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvrelay.engine import noise
from kvrelay.engine.noise import Floats, UInts
from kvrelay.types import Logprobs, Sampling

_NEAR = 4.0
"""Candidates this close to the best are scored first; most of the others then need no logarithms."""
_LUCKY = np.uint64(2**52 - 2**44)
"""Random bits that one in 256 reaches."""
_HUGE = 1e30
"""Penalised logits stay finite, whatever the penalty."""
_FEW = 2048
"""Up to so many candidates all are scored at once."""


@dataclass(frozen=True, slots=True)
class Decision:
    """One drawn token."""

    token: int
    logprobs: Logprobs | None = None


def decide(
    logits: NDArray[np.floating],
    sampling: Sampling,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    index: int,
    eos_token_ids: Sequence[int] = (),
) -> Decision:
    """Draws output token `index` from logits [vocab]; output_ids are the `index` tokens before it."""
    raw = np.asarray(logits, dtype=np.float64)
    if not math.isfinite(raw.max()):
        raise ArithmeticError(f"the model's logits for output index {index} are not finite")
    scores = penalized(raw, sampling, prompt_ids, output_ids, index, eos_token_ids)
    if sampling.temperature == 0:
        token = int(scores.argmax())  # the first of equals
    else:
        token = _draw(*candidates(scores, sampling), seed=sampling.seed, index=index)
    if sampling.logprobs is None:
        return Decision(token)
    return Decision(token, _logprobs(raw, token, sampling.logprobs))


def is_plain_greedy(sampling: Sampling, index: int) -> bool:
    """Whether the decision is the argmax of the raw logits and nothing else, so that it may be made on the device."""
    return (
        sampling.temperature == 0
        and sampling.logprobs is None
        and index >= sampling.min_tokens
        and sampling.repetition_penalty == 1
        and sampling.presence_penalty == 0
        and sampling.frequency_penalty == 0
    )


def penalized(
    raw: Floats,
    sampling: Sampling,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    index: int,
    eos_token_ids: Sequence[int],
) -> Floats:
    """Logits [vocab] after penalties and masks; `raw` itself if there are none, else a copy."""
    scores = raw
    if sampling.repetition_penalty != 1:
        scores = raw.copy()
        seen = np.unique(np.asarray([*prompt_ids, *output_ids], dtype=np.int64))
        at = scores[seen]
        with np.errstate(over="ignore"):
            at = np.where(at > 0, at / sampling.repetition_penalty, at * sampling.repetition_penalty)
        scores[seen] = np.clip(at, -_HUGE, _HUGE)
    if output_ids and (sampling.presence_penalty or sampling.frequency_penalty):
        scores = scores.copy()
        seen, counts = np.unique(np.asarray(output_ids, dtype=np.int64), return_counts=True)
        scores[seen] -= sampling.presence_penalty + sampling.frequency_penalty * counts
    if index < sampling.min_tokens:
        masked = scores.copy()
        masked[[*eos_token_ids, *sampling.stop_token_ids]] = -math.inf
        if math.isfinite(masked.max()):  # or every token would end the answer: then one of them must
            return masked
    return scores


def candidates(scores: Floats, sampling: Sampling) -> tuple[UInts, Floats]:
    """Token ids that may be drawn, in any order, and their logits over temperature, shifted so that the best has 0."""
    z = scaled(scores, sampling.temperature)
    ids = everything = noise.all_ids(len(z))
    if 0 < sampling.top_k < len(z):
        ids = _best(z, sampling.top_k)
    if sampling.top_p < 1:
        ids = _nucleus(z, ids, sampling.top_p)
    if sampling.min_p > 0:
        ids = ids[z[ids] >= math.log(sampling.min_p)]
    return ids, z if ids is everything else z[ids]


def scaled(scores: Floats, temperature: float) -> Floats:
    """Logits over temperature (> 0), shifted so that the best has 0 and none overflows."""
    with np.errstate(over="ignore"):
        return np.asarray((scores - scores.max()) / temperature, dtype=np.float64)


def ranked(z: Floats, ids: UInts) -> UInts:
    """`ids` from best to worst; of equals the lowest id first."""
    return ids[np.lexsort((ids, -z[ids]))]


def _best(z: Floats, k: int) -> UInts:
    """The k best ids, in no order; of equals the lowest ids."""
    cut = np.partition(z, len(z) - k)[len(z) - k]
    above = np.flatnonzero(z > cut)
    equal = np.flatnonzero(z == cut)[: k - len(above)]
    return np.concatenate((above, equal)).astype(np.uint64)


def _nucleus(z: Floats, ids: UInts, top_p: float) -> UInts:
    """The fewest best of `ids` whose probability, renormalised over `ids`, is at least top_p."""
    whole = len(ids) == len(z)
    total = np.exp(z if whole else z[ids]).sum()
    size = 512 if whole else len(ids)
    while True:  # a full sort of the vocabulary is rarely needed
        first = ranked(z, _best(z, size) if whole and size < len(z) else ids)
        mass = np.cumsum(np.exp(z[first])) / total
        if mass[-1] >= top_p or size >= len(ids):
            return first[: int(np.searchsorted(mass, top_p)) + 1]
        size *= 8


def _draw(ids: UInts, z: Floats, *, seed: int, index: int) -> int:
    """The id with the greatest perturbed logit; of equals the lowest."""
    random_bits = noise.bits(seed, index, ids)
    if len(ids) > _FEW:
        keep = _contenders(z, random_bits)
        ids, z, random_bits = ids[keep], z[keep], random_bits[keep]
    perturbed = z + noise.gumbel(random_bits)
    return int(ids[perturbed == perturbed.max()].min())


def _contenders(z: Floats, random_bits: UInts) -> NDArray[np.intp]:
    """Positions that can win: their noise makes up for what they lack to a score that is surely reached.

    Only a few have their noise computed for that: those near the best, and those of the greatest random bits. Few
    others can win then, whether the distribution is peaked or flat.
    """
    near = z > -_NEAR
    lucky = random_bits >= _LUCKY
    probes = np.flatnonzero(near & lucky if np.count_nonzero(near) > _FEW else near)
    if not len(probes):
        return np.arange(len(z))
    reached = float((z[probes] + noise.gumbel(random_bits[probes])).max())
    can_win = near & (random_bits >= noise.bits_above(reached))
    return np.flatnonzero(can_win | (random_bits >= noise.bits_above(reached + _NEAR)))


def _logprobs(raw: Floats, token: int, top: int) -> Logprobs:
    shifted = raw - raw.max()
    logs = shifted - math.log(np.exp(shifted).sum())
    best = ranked(logs, _best(logs, min(top, len(logs)))) if top else ()
    return Logprobs(float(logs[token]), tuple((int(one), float(logs[one])) for one in best))
