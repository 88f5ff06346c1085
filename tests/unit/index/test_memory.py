"""The router's own memory, bounded."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.index.base import Lookup, depth
from kvrelay.index.memory import MemoryIndex, RememberingIndex
from tests.unit.index.stages import chain


@given(st.integers(0, 300).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))))
def test_bisection_finds_every_depth_in_few_questions(blocks_and_held: tuple[int, int]) -> None:
    blocks, held = blocks_and_held
    asked = []
    assert depth(blocks, lambda i: asked.append(i) is None and i < held) == held
    assert len(asked) <= blocks.bit_length()


@given(st.lists(st.text("ab", min_size=1, max_size=8), max_size=30), st.integers(1, 10))
def test_what_stays_of_a_full_memory_is_prefix_closed_and_holds_the_latest(texts: list[str], limit: int) -> None:
    memory = MemoryIndex(max_blocks=limit)
    for text in texts:
        memory.record("m1", chain(text))
        assert memory.depths(chain(text)) == {"m1": min(limit, len(text))}
        held = memory._held["m1"]
        assert len(held) <= limit
        for other in texts:
            known = [block in held for block in chain(other)]
            assert known == sorted(known, reverse=True)


async def test_memory_answers_degraded_when_the_shared_index_does_not_answer() -> None:
    class Shared:
        answer = Lookup({"m1": 5})

        async def lookup(self, hashes: object) -> Lookup:
            return self.answer

    shared, memory = Shared(), MemoryIndex()
    memory.record("m2", chain("ab"))
    index = RememberingIndex(shared, memory)
    assert await index.lookup(chain("abc")) == Lookup({"m1": 5})
    shared.answer = Lookup(degraded=True)
    assert await index.lookup(chain("abc")) == Lookup({"m2": 2}, degraded=True)
    assert await RememberingIndex(None, memory).lookup(chain("abc")) == Lookup({"m2": 2}, degraded=True)


def test_a_memory_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="max_blocks: must be >= 1, got 0"):
        MemoryIndex(0)
