"""Agents at work: long conversations whose hit rates follow from their turns. Pure."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvrelay.load.ids import dice, draw_ids
from kvrelay.load.lengths import Lengths, Spreading
from kvrelay.load.workload import Conversation, Turn


@dataclass(frozen=True, slots=True)
class Agents:
    """A system prompt of one of a few kinds of agent, a task, then tool results, each after the tool's time.

    A turn's prompt is all that was said before, so its ideal hit rate is what came before ÷ what is said by then: near
    0 on an agent's first turn beyond its system prompt, and higher with every turn.
    """

    seed: int
    vocab_size: int
    count: int | None
    """Conversations; None: endless."""
    system_tokens: Lengths = Lengths(256, 256)
    task_tokens: Lengths = Lengths(64, 256)
    result_tokens: Lengths = Lengths(32, 128)
    output_tokens: Lengths = Lengths(16, 64)
    turns: Lengths = Lengths(4, 8)
    think_s: Spreading = Spreading(0.2, 5.0, 1.0)
    """Of a tool, before its result is sent."""
    kinds: int = 4

    def warm_up(self) -> Sequence[Conversation]:
        """Each kind's system prompt once."""
        turn = Turn(draw_ids(dice(self.seed, "end"), 1, self.vocab_size), 1, self.seed)
        return [Conversation(f"system-{kind}", self._system(kind), (turn,)) for kind in range(self.kinds)]

    def conversations(self) -> Iterator[Conversation]:
        """`count` conversations."""
        systems = [self._system(kind) for kind in range(self.kinds)]
        for number in itertools.count() if self.count is None else range(self.count):
            chance = dice(self.seed, "agent", number)
            system = systems[int(chance.integers(self.kinds))]
            turns = tuple(self._turn(chance, turn) for turn in range(self.turns.draw(chance)))
            yield Conversation(f"agent-{number}", system, turns)

    def _turn(self, chance: np.random.Generator, number: int) -> Turn:
        lengths = self.result_tokens if number else self.task_tokens
        ids = draw_ids(chance, lengths.draw(chance), self.vocab_size)
        think_s = self.think_s.draw(chance) if number else 0.0
        return Turn(ids, self.output_tokens.draw(chance), int(chance.integers(2**32)), think_s)

    def _system(self, kind: int) -> tuple[int, ...]:
        chance = dice(self.seed, "system", kind)
        return draw_ids(chance, self.system_tokens.draw(chance), self.vocab_size)
