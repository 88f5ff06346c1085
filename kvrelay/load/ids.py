"""Chance and token ids, made from a seed: equal purposes give equal draws, in any process. Knows no workload."""

from zlib import crc32

import numpy as np

FIRST_ID = 32
"""Drawn ids lie in [FIRST_ID, 0.9 vocab): special tokens are kept at one end or the other of a vocabulary."""


def dice(seed: int, *purpose: int | str) -> np.random.Generator:
    """A generator for one purpose under a seed (>= 0); other purposes draw independently of it."""
    return np.random.default_rng([seed, *(p if isinstance(p, int) else crc32(p.encode()) for p in purpose)])


def draw_ids(chance: np.random.Generator, count: int, vocab_size: int) -> tuple[int, ...]:
    """`count` ids, evenly from the ordinary part of a vocabulary."""
    drawn = chance.integers(FIRST_ID, max(int(vocab_size * 0.9), FIRST_ID + 1), size=count)
    return tuple(drawn.tolist())
