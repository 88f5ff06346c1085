"""The prefix tree as a state machine against a model of sets, and its order of eviction."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvrelay.kvcache.hashing import block_hashes
from kvrelay.kvcache.pool import BrokenInvariant
from kvrelay.kvcache.radix import Node, RadixTree


def path_hashes(path: list[int]) -> list[bytes]:
    return block_hashes(b"root", path, 1)


def grow(tree: RadixTree, path: list[int], first_block: int) -> list[Node]:
    """Inserts a whole path, locked."""
    nodes: list[Node] = []
    for offset, block_hash in enumerate(path_hashes(path)):
        nodes.append(tree.insert(nodes[-1] if nodes else None, block_hash, first_block + offset))
    return nodes


class RadixMachine(RuleBasedStateMachine):
    """A holder matches and locks a path, then may insert below it; blocks are numbered as they are made."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = RadixTree()
        self.cached: dict[bytes, int] = {}
        self.announced: set[bytes] = set()
        self.holders: list[tuple[list[int], list[Node]]] = []
        self.next_block = 0

    @rule(path=st.lists(st.integers(0, 2), max_size=5))
    def enter(self, path: list[int]) -> None:
        hashes = path_hashes(path)
        nodes = self.tree.match(hashes)
        expected = next((at for at, one in enumerate(hashes) if one not in self.cached), len(hashes))
        assert [node.block_id for node in nodes] == [self.cached[one] for one in hashes[:expected]]
        self.tree.lock(nodes)
        self.holders.append((path, nodes))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def insert(self, data: st.DataObject) -> None:
        path, nodes = data.draw(st.sampled_from(self.holders))
        if len(nodes) == len(path):
            return
        block_hash = path_hashes(path)[len(nodes)]
        block, self.next_block = self.next_block, self.next_block + 1
        node = self.tree.insert(nodes[-1] if nodes else None, block_hash, block)
        nodes.append(node)
        assert node.block_id == self.cached.setdefault(block_hash, block), "the first copy is kept"

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        self.holders.remove(holder)
        self.tree.unlock(holder[1])

    @rule(n=st.integers(1, 4))
    def evict(self, n: int) -> None:
        before = self.tree.evictable
        self.drop(self.tree.evict(n), min(n, before))

    @rule()
    def flush(self) -> None:
        self.drop(self.tree.flush(), self.tree.evictable)
        assert self.tree.evictable == 0

    def drop(self, freed: list[int], at_least: int) -> None:
        assert len(freed) >= at_least
        held = {node.block_id for _, nodes in self.holders for node in nodes}
        assert not held & set(freed), "a locked block was evicted"
        by_block = {block: block_hash for block_hash, block in self.cached.items()}
        for block in freed:
            del self.cached[by_block[block]]

    @invariant()
    def tree_equals_model(self) -> None:
        self.tree.check_integrity()
        assert dict(zip(self.tree.hashes(), self.tree.block_ids(), strict=True)) == self.cached
        held = {node.block_id for _, nodes in self.holders for node in nodes}
        assert self.tree.evictable == len(self.cached) - len(held)
        assert self.tree.lock_count() == sum(len(nodes) for _, nodes in self.holders)
        for change in self.tree.take_changes():
            assert (change.block_hash in self.announced) != change.added
            (self.announced.add if change.added else self.announced.remove)(change.block_hash)
        assert self.announced == self.cached.keys()


RadixMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestRadix = RadixMachine.TestCase


def test_the_least_recently_used_leaf_goes_first_and_parents_after_their_children() -> None:
    tree = RadixTree()
    old, new = grow(tree, [1, 2], 10), grow(tree, [3, 4], 20)
    tree.unlock(old)
    tree.unlock(new)
    assert tree.evict(1) == [11]
    used = tree.match(path_hashes([1]))
    tree.lock(used)
    tree.unlock(used)
    assert tree.evict(3) == [21, 20, 10]
    assert len(tree) == 0


def test_changes_name_parents_first_when_added_and_last_when_removed() -> None:
    tree = RadixTree()
    tree.unlock(grow(tree, [1, 2, 3], 0))
    tree.flush()
    changes = tree.take_changes()
    hashes = path_hashes([1, 2, 3])
    assert [one.block_hash for one in changes] == hashes + hashes[::-1]
    assert [one.added for one in changes] == [True] * 3 + [False] * 3
    assert tree.take_changes() == []


def test_much_use_without_eviction_does_not_grow_the_heap_without_bound() -> None:
    tree = RadixTree()
    tree.unlock(grow(tree, [1, 2, 3], 0))
    for _ in range(1000):
        path = tree.match(path_hashes([1, 2, 3]))
        tree.lock(path)
        tree.unlock(path)
    tree.check_integrity()
    assert len(tree._leaves) < 100
    assert tree.evict(3) == [2, 1, 0]


def test_unlocking_twice_is_a_bug_that_is_named() -> None:
    tree = RadixTree()
    nodes = grow(tree, [1], 5)
    tree.unlock(nodes)
    with pytest.raises(BrokenInvariant, match="block 5"):
        tree.unlock(nodes)
