"""What a prefix index answers: how many leading blocks of a prompt each stage holds. Knows no store."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Lookup:
    """The answer to one look-up."""

    depths: Mapping[str, int] = field(default_factory=dict)
    """Leading blocks held, by instance id; an instance that holds none may be absent."""
    degraded: bool = False
    """The shared index did not answer: `depths` are remembered or unknown."""


class PrefixIndex(Protocol):
    """Implementations pass tests/contract/test_index.py."""

    async def lookup(self, hashes: Sequence[bytes]) -> Lookup:
        """Depths for the chained hashes (16 bytes each) of a prompt's whole blocks. Raises nothing."""


def depth(blocks: int, holds: Callable[[int], bool]) -> int:
    """How many leading blocks are held, by bisection. `holds(i)`: block i in [0, blocks) is held.

    Holders are prefix-closed (who holds a block holds those before it), so that log2(blocks) questions do.
    """
    low, high = 0, blocks
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            low = middle + 1
        else:
            high = middle
    return low
