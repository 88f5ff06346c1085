"""Prompts whose hit rates are given directly, by sharing parts of a few documents. Pure."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvrelay.load.ids import dice, draw_ids
from kvrelay.load.lengths import Lengths, Spreading
from kvrelay.load.workload import Conversation, Turn


@dataclass(frozen=True, slots=True)
class HitRates:
    """Shares of a first prompt that other prompts have already, with weights: agents' traffic is very skewed."""

    rates: tuple[float, ...]
    weights: tuple[float, ...]

    @classmethod
    def parse(cls, text: str) -> "HitRates":
        """ "0.97:75,0.8:20,0:5": 75 of 100 hit 97 %, and so on. A single rate needs no weight. ValueError otherwise."""
        parts = [part.partition(":") for part in text.split(",")]
        hits = cls(tuple(float(rate) for rate, _, _ in parts), tuple(float(weight or 1) for _, _, weight in parts))
        if not all(0 <= rate < 1 for rate in hits.rates) or not all(0 < w < math.inf for w in hits.weights):
            raise ValueError(f"{text}: expected rates in [0, 1) and finite weights > 0")
        return hits

    def draw(self, chance: np.random.Generator) -> float:
        """One rate."""
        at = chance.uniform(0, sum(self.weights))
        return self.rates[min(int(np.searchsorted(np.cumsum(self.weights), at, "right")), len(self.rates) - 1)]

    @property
    def mean(self) -> float:
        """The expected rate."""
        return sum(r * w for r, w in zip(self.rates, self.weights, strict=True)) / sum(self.weights)


SKEWED = "0.98:75,0.8:18,0.3:7"
"""Agents' traffic: 75 % of the requests hit more than 95 %, a few hit little; the mean is 90 %."""


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Conversations that open with a part of one of a few documents; the part's length makes the first turn's hit rate.

    The caches hold the documents after the warm-up, so a conversation's hit does not depend on which came before it.
    """

    seed: int
    vocab_size: int
    count: int | None
    """Conversations; None: endless."""
    hits: HitRates
    prompt_tokens: Lengths
    """Of the first turn's prompt."""
    output_tokens: Lengths
    documents: int = 4
    turns: int = 1
    turn_tokens: Lengths = Lengths(16, 64)
    """New ids of a later turn."""
    think_s: Spreading = Spreading(0, 0)
    """Before a later turn."""
    document_tokens: int = 0
    """Of each document; 0: as long as the longest shared part of uniform lengths."""

    def warm_up(self) -> Sequence[Conversation]:
        """Each document once, if any conversation will share a part of it."""
        if not any(self.hits.rates):
            return []
        turn = Turn(draw_ids(dice(self.seed, "end"), 1, self.vocab_size), 1, self.seed)
        return [Conversation(f"document-{d}", self._document(d), (turn,)) for d in range(self.documents)]

    def conversations(self) -> Iterator[Conversation]:
        """`count` conversations."""
        documents = [self._document(number) for number in range(self.documents)]
        for number in itertools.count() if self.count is None else range(self.count):
            yield self._conversation(number, documents)

    def _conversation(self, number: int, documents: Sequence[tuple[int, ...]]) -> Conversation:
        chance = dice(self.seed, "conversation", number)
        length = self.prompt_tokens.draw(chance)
        shared = min(int(self.hits.draw(chance) * length), length - 1)
        opening = documents[int(chance.integers(self.documents))][:shared]
        first = self._turn(chance, length - len(opening), 0.0)
        later = [self._turn(chance, self.turn_tokens.draw(chance), None) for _ in range(self.turns - 1)]
        return Conversation(f"conversation-{number}", opening, (first, *later))

    def _turn(self, chance: np.random.Generator, length: int, think_s: float | None) -> Turn:
        ids = draw_ids(chance, length, self.vocab_size)
        wait_s = self.think_s.draw(chance) if think_s is None else think_s
        return Turn(ids, self.output_tokens.draw(chance), int(chance.integers(2**32)), wait_s)

    def _document(self, number: int) -> tuple[int, ...]:
        prompt = self.prompt_tokens
        usual = round(prompt.low * 2.72 ** (2.33 * prompt.sigma))  # the 99th percentile, if lognormal
        longest = min(prompt.high, usual) if prompt.sigma else prompt.high
        length = self.document_tokens or int(max(self.hits.rates) * longest)
        return draw_ids(dice(self.seed, "document", number), length, self.vocab_size)
