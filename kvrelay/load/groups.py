"""Random prompts, alone or in groups that share a prefix. Pure."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvrelay.load.ids import dice, draw_ids
from kvrelay.load.lengths import Lengths
from kvrelay.load.workload import Conversation, Turn


@dataclass(frozen=True, slots=True)
class PrefixGroups:
    """One-turn conversations; each belongs to one of `groups`, whose members have their first ids in common."""

    seed: int
    vocab_size: int
    count: int | None
    """Conversations; None: endless."""
    prompt_tokens: Lengths
    """Of a member's own part."""
    output_tokens: Lengths
    groups: int = 0
    """0: nothing is shared."""
    prefix_tokens: Lengths = Lengths(512, 512)

    def warm_up(self) -> Sequence[Conversation]:
        """Each group's prefix once."""
        turn = Turn(draw_ids(dice(self.seed, "end"), 1, self.vocab_size), 1, self.seed)
        return [Conversation(f"group-{g}", self._prefix(g), (turn,)) for g in range(self.groups)]

    def conversations(self) -> Iterator[Conversation]:
        """`count` conversations."""
        prefixes = [self._prefix(group) for group in range(self.groups)]
        for number in itertools.count() if self.count is None else range(self.count):
            chance = dice(self.seed, "member", number)
            prefix = prefixes[int(chance.integers(self.groups))] if prefixes else ()
            ids = draw_ids(chance, self.prompt_tokens.draw(chance), self.vocab_size)
            turn = Turn(ids, self.output_tokens.draw(chance), int(chance.integers(2**32)))
            yield Conversation(f"conversation-{number}", prefix, (turn,))

    def _prefix(self, group: int) -> tuple[int, ...]:
        chance = dice(self.seed, "group", group)
        return draw_ids(chance, self.prefix_tokens.draw(chance), self.vocab_size)
