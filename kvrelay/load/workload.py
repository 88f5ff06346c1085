"""What the clients of a load run say: conversations made from a seed. Pure; knows no clock and no network."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

FIRST_ID = 32
"""Drawn ids lie in [FIRST_ID, 0.9 vocab): special tokens are kept at one end or the other of a vocabulary."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a conversation: the conversation so far, then these ids."""

    fresh_ids: tuple[int, ...]
    max_tokens: int
    seed: int


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns that follow each other; a turn's prompt is the last prompt, its answer, and the turn's own ids."""

    name: str
    opening_ids: tuple[int, ...]
    """In front of the first turn: shared with other conversations, so that caches can hold it."""
    turns: tuple[Turn, ...]


class Workload(Protocol):
    """Where a load run gets its conversations; the same ones each time it is asked."""

    def warm_up(self) -> Sequence[Conversation]:
        """To be run before the measured ones, so that caches hold what these share."""

    def conversations(self) -> Iterator[Conversation]:
        """The measured ones, in order of arrival."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Whole numbers drawn evenly from [low, high]."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        """ "512" or "128-1024". ValueError otherwise."""
        low, _, high = text.partition("-")
        lengths = cls(int(low), int(high or low))
        if not 1 <= lengths.low <= lengths.high:
            raise ValueError(f"{text}: expected 1 <= low <= high")
        return lengths

    def draw(self, dice: random.Random) -> int:
        """One length."""
        return dice.randint(self.low, self.high)


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
        if not all(0 <= rate < 1 for rate in hits.rates) or not all(weight > 0 for weight in hits.weights):
            raise ValueError(f"{text}: expected rates in [0, 1) and weights > 0")
        return hits

    def draw(self, dice: random.Random) -> float:
        """One rate."""
        return dice.choices(self.rates, self.weights)[0]

    @property
    def mean(self) -> float:
        """The expected rate."""
        return sum(r * w for r, w in zip(self.rates, self.weights, strict=True)) / sum(self.weights)


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Conversations that open with a part of one of a few documents; the part's length makes the first turn's hit rate.

    The caches hold the documents after the warm-up, so a conversation's hit does not depend on which came before it.
    """

    seed: int
    vocab_size: int
    count: int
    """Conversations."""
    hits: HitRates
    prompt_tokens: Lengths
    """Of the first turn's prompt."""
    output_tokens: Lengths
    documents: int = 4
    turns: int = 1
    turn_tokens: Lengths = Lengths(16, 64)
    """New ids of a later turn."""

    def warm_up(self) -> Sequence[Conversation]:
        """Each document once, if any conversation will share a part of it."""
        if not any(self.hits.rates):
            return []
        turn = Turn(self._ids(self._dice("end"), 1), 1, self.seed)
        return [Conversation(f"document-{d}", self._document(d), (turn,)) for d in range(self.documents)]

    def conversations(self) -> Iterator[Conversation]:
        """`count` conversations."""
        for number in range(self.count):
            yield self._conversation(number)

    def _conversation(self, number: int) -> Conversation:
        dice = self._dice(number)
        length = self.prompt_tokens.draw(dice)
        shared = min(int(self.hits.draw(dice) * length), length - 1)
        opening = self._document(dice.randrange(self.documents))[:shared]
        first = self._turn(dice, length - shared)
        later = tuple(self._turn(dice, self.turn_tokens.draw(dice)) for _ in range(self.turns - 1))
        return Conversation(f"conversation-{number}", opening, (first, *later))

    def _turn(self, dice: random.Random, length: int) -> Turn:
        return Turn(self._ids(dice, length), self.output_tokens.draw(dice), dice.getrandbits(32))

    def _document(self, number: int) -> tuple[int, ...]:
        longest = int(max(self.hits.rates) * self.prompt_tokens.high)
        return self._ids(self._dice(f"document {number}"), longest)

    def _ids(self, dice: random.Random, length: int) -> tuple[int, ...]:
        return tuple(dice.randrange(FIRST_ID, int(self.vocab_size * 0.9)) for _ in range(length))

    def _dice(self, purpose: object) -> random.Random:
        return random.Random(f"{self.seed} {purpose}")
