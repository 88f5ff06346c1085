"""How deep each stage's cache holds a prompt: the shared index, or the router's own memory when it does not answer."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvrelay.index.memory import MemoryIndex, RememberingIndex
from kvrelay.index.redis import RedisIndex
from kvrelay.kvcache.hashing import block_hashes
from services.router.input import Ask
from services.router.route import Route


@dataclass(frozen=True, slots=True)
class Hits:
    """Of one prompt."""

    tokens: dict[str, int]
    """Instance id -> cached tokens."""
    degraded: bool
    """Remembered, not looked up."""


class Prefixes:
    """`shared` is None without Redis: then everything is remembered, and degraded."""

    def __init__(self, shared: RedisIndex | None, memory: MemoryIndex) -> None:
        self._shared = shared
        self._index = RememberingIndex(shared, memory)
        self._memory = memory

    @property
    def connected(self) -> bool:
        """Does the shared index answer?"""
        return self._shared is not None and self._shared.connected

    async def hits(self, hashes: Sequence[bytes], block_tokens: int) -> Hits:
        """One look-up. Never fails: without an answer it is degraded."""
        found = await self._index.lookup(hashes)
        return Hits({name: depth * block_tokens for name, depth in found.depths.items()}, found.degraded)

    def remember(self, ask: Ask, route: Route) -> None:
        """The stages of this route will hold the prompt."""
        for stage in (route.prefill, route.relay, route.main):
            if stage is not None and stage.description.prefix_cache:
                self._memory.record(stage.instance_id, ask.hashes)

    def remember_answer(self, ask: Ask, main: str, output_ids: Sequence[int], block_tokens: int) -> None:
        """Main decode holds the answer too: the next turn of a chat begins with both."""
        parent = ask.hashes[-1] if ask.hashes else ask.root
        tail = [*ask.prompt_ids[len(ask.hashes) * block_tokens :], *output_ids]
        self._memory.record(main, [*ask.hashes, *block_hashes(parent, tail, block_tokens)])

    def forget(self, instance_id: str) -> None:
        """It has restarted: its cache is empty."""
        self._memory.forget(instance_id)
