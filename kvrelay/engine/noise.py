"""The sampler's noise: a counter hash of (seed, output index, token id). Knows no logits.

splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014) finalises a counter. There is no
state, so any stage that draws one index draws the same, whatever its batch, device or history.
"""

import functools

import numpy as np
from numpy.typing import NDArray

UInts = NDArray[np.uint64]
Floats = NDArray[np.float64]

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_MUL_1 = 0xBF58476D1CE4E5B9
_MUL_2 = 0x94D049BB133111EB


def bits(seed: int, index: int, token_ids: UInts) -> UInts:
    """52 random bits for each token id, as integers in [0, 2^52)."""
    x = token_ids * np.uint64(_GAMMA)
    x += np.uint64(_mix(_mix(seed + _GAMMA) ^ _mix(index * _MUL_1 + 1)))
    x ^= x >> np.uint64(30)
    x *= np.uint64(_MUL_1)
    x ^= x >> np.uint64(27)
    x *= np.uint64(_MUL_2)
    x ^= x >> np.uint64(31)
    x >>= np.uint64(12)
    return x


def uniform(random_bits: UInts) -> Floats:
    """Uniform in (0, 1), both ends excluded: 52 bits and a half step are exact in float64."""
    return (random_bits.astype(np.float64) + 0.5) * 2.0**-52


def gumbel(random_bits: UInts) -> Floats:
    """Standard Gumbel noise; argmax(logits + noise) is a draw from softmax(logits)."""
    return np.asarray(-np.log(-np.log(uniform(random_bits))), dtype=np.float64)


def bits_above(gumbel_value: float) -> np.uint64:
    """A bound that all random bits whose Gumbel noise is >= gumbel_value exceed or equal (and few others)."""
    share = float(np.exp(-np.exp(-max(gumbel_value, -700.0))))
    return np.uint64(max(0, int(share * 2.0**52) - 16))


@functools.lru_cache(maxsize=4)
def all_ids(vocab_size: int) -> UInts:
    """0 .. vocab_size - 1, read-only."""
    ids = np.arange(vocab_size, dtype=np.uint64)
    ids.flags.writeable = False
    return ids


def _mix(x: int) -> int:
    x &= _MASK
    x = ((x ^ (x >> 30)) * _MUL_1) & _MASK
    x = ((x ^ (x >> 27)) * _MUL_2) & _MASK
    return x ^ (x >> 31)
