"""A prefix tree over KV blocks, keyed by chained block hash. Knows no sequence, no token, no pool.

A node is one block. Since a hash covers the whole prefix, a hash names at most one node, and a match is one look-up a
block.
Locks are counted on every node of a path from the root, so an unlocked node has only unlocked nodes below it.
"""

import heapq
from collections.abc import Iterable, Sequence

from kvrelay.kvcache.pool import BrokenInvariant
from kvrelay.types import CacheChange


class Node:
    """One cached block."""

    __slots__ = ("block_hash", "block_id", "children", "locks", "parent", "used")

    def __init__(self, block_hash: bytes, block_id: int, parent: "Node | None") -> None:
        self.block_hash = block_hash
        self.block_id = block_id
        self.parent = parent
        self.children = 0
        self.locks = 0
        self.used = 0
        """When it was last locked or unlocked, in ticks of the tree's clock."""


class RadixTree:
    """Owns the blocks that are put into it until evict or flush gives them back."""

    def __init__(self) -> None:
        self._nodes: dict[bytes, Node] = {}
        self._clock = 0
        self._unlocked = 0
        self._leaves: list[tuple[int, bytes]] = []
        """Heap of (used, hash) of leaves that could be evicted when they were pushed; stale entries are skipped."""
        self._changes: list[CacheChange] = []

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def evictable(self) -> int:
        """Blocks that `evict` could give back."""
        return self._unlocked

    def match(self, hashes: Iterable[bytes]) -> list[Node]:
        """The longest cached prefix. Nothing is locked yet: lock before anything is inserted or evicted."""
        found: list[Node] = []
        for block_hash in hashes:
            node = self._nodes.get(block_hash)
            if node is None:
                break
            found.append(node)
        return found

    def lock(self, path: Sequence[Node]) -> None:
        """Keeps a path from the root (or its continuation below a path that the caller holds) from eviction."""
        self._clock += 1
        for node in path:
            self._unlocked -= node.locks == 0
            node.locks += 1
            node.used = self._clock

    def unlock(self, path: Sequence[Node]) -> None:
        """Undoes one lock() of the same nodes."""
        self._clock += 1
        for node in path:
            if node.locks < 1:
                raise BrokenInvariant(f"block {node.block_id} is unlocked more often than locked")
            node.locks -= 1
            node.used = self._clock
            self._unlocked += node.locks == 0
            self._offer(node)

    def insert(self, parent: Node | None, block_hash: bytes, block_id: int) -> Node:
        """Puts a computed block below `parent` (None: the root), which the caller has locked; the result is locked too.

        Of two copies the first is kept: if result.block_id != block_id, the caller still owns block_id, now redundant.
        """
        node = self._nodes.get(block_hash)
        if node is None:
            node = Node(block_hash, block_id, parent)
            self._nodes[block_hash] = node
            self._unlocked += 1
            if parent is not None:
                parent.children += 1
            self._changes.append(CacheChange(True, block_hash))
        self.lock((node,))
        return node

    def evict(self, n: int) -> list[int]:
        """Drops up to n unlocked leaves, least recently used first; returns their block ids, now the caller's."""
        freed: list[int] = []
        while len(freed) < n and self._leaves:
            used, block_hash = heapq.heappop(self._leaves)
            node = self._nodes.get(block_hash)
            if node is not None and node.used == used and _is_free_leaf(node):
                freed.append(self._drop(node))
        return freed

    def flush(self) -> list[int]:
        """Drops everything unlocked; returns the block ids, now the caller's."""
        return self.evict(self._unlocked)

    def take_changes(self) -> list[CacheChange]:
        """What was added and removed since the last call, in order: parents before children, and the reverse."""
        changes, self._changes = self._changes, []
        return changes

    def hashes(self) -> list[bytes]:
        """All cached hashes, parents before children."""
        # A parent is in the dict before its child: it was there when the child came, and outlives it.
        return list(self._nodes)

    def block_ids(self) -> list[int]:
        """All blocks owned by the tree."""
        return [node.block_id for node in self._nodes.values()]

    def lock_count(self) -> int:
        """Locks held on all nodes together; 0 when idle."""
        return sum(node.locks for node in self._nodes.values())

    def check_integrity(self) -> None:
        """BrokenInvariant unless counts, locks, links and the eviction heap agree."""
        children = dict.fromkeys(self._nodes, 0)
        locks_below = dict.fromkeys(self._nodes, 0)
        for node in self._nodes.values():
            if node.parent is not None:
                if self._nodes.get(node.parent.block_hash) is not node.parent:
                    raise BrokenInvariant(f"the parent of block {node.block_id} is not in the tree")
                children[node.parent.block_hash] += 1
                locks_below[node.parent.block_hash] += node.locks
        offered = set(self._leaves)
        for block_hash, node in self._nodes.items():
            if node.children != children[block_hash] or node.locks < locks_below[block_hash]:
                raise BrokenInvariant(f"block {node.block_id}: child or lock counts are wrong")
            if _is_free_leaf(node) and (node.used, block_hash) not in offered:
                raise BrokenInvariant(f"block {node.block_id} could be evicted but is not offered")
        if self._unlocked != sum(node.locks == 0 for node in self._nodes.values()):
            raise BrokenInvariant("the count of unlocked blocks is wrong")

    def _offer(self, node: Node) -> None:
        if _is_free_leaf(node):
            heapq.heappush(self._leaves, (node.used, node.block_hash))
            if len(self._leaves) > 64 + 4 * len(self._nodes):
                self._leaves = [(n.used, n.block_hash) for n in self._nodes.values() if _is_free_leaf(n)]
                heapq.heapify(self._leaves)

    def _drop(self, node: Node) -> int:
        del self._nodes[node.block_hash]
        self._unlocked -= 1
        self._changes.append(CacheChange(False, node.block_hash))
        if node.parent is not None:
            node.parent.children -= 1
            self._offer(node.parent)
        return node.block_id


def _is_free_leaf(node: Node) -> bool:
    return node.locks == 0 and node.children == 0
