"""A prefix index in this process: the router's memory of what it routed. Knows no network and no expiry but size."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from kvrelay.index.base import Lookup, PrefixIndex, depth
from kvrelay.types import CacheChange


class MemoryIndex:
    """Block hashes by instance; beyond `max_blocks` of an instance the least recently recorded go, deepest first."""

    def __init__(self, max_blocks: int = 65_536) -> None:
        if max_blocks < 1:
            raise ValueError(f"max_blocks: must be >= 1, got {max_blocks}")
        self._max_blocks = max_blocks
        self._held: dict[str, OrderedDict[bytes, None]] = {}

    async def lookup(self, hashes: Sequence[bytes]) -> Lookup:
        """Part of PrefixIndex; never degraded."""
        return Lookup(self.depths(hashes))

    def depths(self, hashes: Sequence[bytes]) -> dict[str, int]:
        """Leading blocks by instance, of those that hold any."""
        found = {
            instance_id: depth(len(hashes), lambda i, held=held: hashes[i] in held)  # type: ignore[misc]
            for instance_id, held in self._held.items()
        }
        return {instance_id: blocks for instance_id, blocks in found.items() if blocks}

    def record(self, instance_id: str, hashes: Sequence[bytes]) -> None:
        """The instance will hold this whole chain."""
        held = self._held.setdefault(instance_id, OrderedDict())
        # The root last, so that it is the last to go: what stays is prefix-closed.
        for block in reversed(hashes):
            held[block] = None
            held.move_to_end(block)
        while len(held) > self._max_blocks:
            held.popitem(last=False)

    def apply(self, instance_id: str, changes: Iterable[CacheChange]) -> None:
        """The instance's own word on its cache, in order."""
        for change in changes:
            if change.added:
                self.record(instance_id, [change.block_hash])
            else:
                self._held.get(instance_id, OrderedDict()).pop(change.block_hash, None)

    def forget(self, instance_id: str) -> None:
        """The instance left, restarted (its epoch changed) or flushed its cache."""
        self._held.pop(instance_id, None)


class RememberingIndex:
    """A shared index, and this router's own memory for when it does not answer (or there is none)."""

    def __init__(self, shared: PrefixIndex | None, memory: MemoryIndex) -> None:
        self._shared = shared
        self._memory = memory

    async def lookup(self, hashes: Sequence[bytes]) -> Lookup:
        """Part of PrefixIndex: degraded whenever the depths are remembered."""
        if self._shared is not None:
            answer = await self._shared.lookup(hashes)
            if not answer.degraded:
                return answer
        return Lookup(self._memory.depths(hashes), degraded=True)
