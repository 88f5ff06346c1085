"""Which blocks a sequence has: joins the pool and the tree for one sequence at a time. Knows no queue and no batch."""

from collections.abc import Iterable

from kvrelay.engine.sequence import Sequence
from kvrelay.kvcache.hashing import block_hashes, root_hash
from kvrelay.kvcache.pool import BrokenInvariant, KvPool
from kvrelay.kvcache.radix import RadixTree


class BlockBook:
    """Every block is free, in the tree, or private to one sequence."""

    def __init__(self, pool: KvPool, prefix_cache: bool) -> None:
        self._pool = pool
        self._prefix_cache = prefix_cache
        self._block_tokens = pool.layout.block_tokens
        self.tree = RadixTree()

    @property
    def available(self) -> int:
        """Blocks that could be taken now: free or evictable."""
        return self._pool.free_count + self.tree.evictable

    def admit(self, seq: Sequence, tokens: int, spare: int = 0) -> bool:
        """Locks the cached prefix and takes blocks for `tokens` tokens in all; False (and nothing taken) if they lack.

        `spare` blocks must remain available.
        """
        path = self.tree.match(self._hashes(seq, seq.reusable_blocks)) if self._prefix_cache else []
        self.tree.lock(path)
        need = self._blocks_for(tokens) - len(path)
        if need + spare > self.available:
            self.tree.unlock(path)
            return False
        seq.nodes = path
        seq.table = [node.block_id for node in path] + self._take(max(0, need))
        seq.computed = len(path) * self._block_tokens
        return True

    def grow(self, seq: Sequence, tokens: int) -> bool:
        """Extends the table to cover `tokens` tokens, evicting cache; False (and nothing taken) if it cannot."""
        need = self._blocks_for(tokens) - len(seq.table)
        if need > self.available:
            return False
        if need > 0:
            seq.table += self._take(need)
        return True

    def publish(self, seq: Sequence, tokens: int) -> None:
        """Puts the whole blocks of the first `tokens` tokens into the tree, whose KV is complete.

        Where the tree has a block already, the table is switched to it. The sequence's own copy is freed, unless its
        id was told to a reader (Admitted of a sequence that is not loading): then it is kept until release().
        """
        if not self._prefix_cache:
            return
        whole = tokens // self._block_tokens
        hashes = self._hashes(seq, whole)
        for index in range(len(seq.nodes), whole):
            mine = seq.table[index]
            node = self.tree.insert(seq.nodes[-1] if seq.nodes else None, hashes[index], mine)
            seq.nodes.append(node)
            if node.block_id != mine:
                seq.table[index] = node.block_id
                if index < seq.prompt_blocks and not seq.spec.await_kv:
                    seq.parked.append(mine)
                else:
                    self._pool.free((mine,))

    def rewind(self, seq: Sequence) -> None:
        """Makes the last row computable again after its KV came from outside, without writing into a shared block.

        Only for a sequence whose last whole block ends its ids: it was given everything but something to sample from.
        """
        if len(seq.nodes) * self._block_tokens < len(seq.ids):
            seq.computed = len(seq.ids) - 1  # the last block is private
            return
        index = len(seq.nodes) - 1
        self.tree.unlock((seq.nodes.pop(),))
        last = seq.table.pop()
        if index < len(seq.table):
            seq.table[index] = last
        seq.computed = index * self._block_tokens

    def release(self, seq: Sequence) -> None:
        """Gives everything back; what is in the tree stays cached."""
        self._pool.free(seq.table[len(seq.nodes) :])
        self._pool.free(seq.parked)
        self.tree.unlock(seq.nodes)
        seq.nodes, seq.table, seq.parked, seq.computed = [], [], [], 0

    def flush(self) -> int:
        """Drops what no sequence holds; returns how many blocks."""
        dropped = self.tree.flush()
        self._pool.free(dropped)
        return len(dropped)

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """BrokenInvariant unless free + cached + private blocks are the pool, and locks are what sequences hold."""
        self._pool.check_integrity()
        self.tree.check_integrity()
        owned = self.tree.block_ids()
        locks = 0
        for seq in sequences:
            owned += seq.table[len(seq.nodes) :] + seq.parked
            locks += len(seq.nodes)
            if [node.block_id for node in seq.nodes] != seq.table[: len(seq.nodes)]:
                raise BrokenInvariant(f"{seq.spec.sequence_id}: the block table and the tree's path differ")
        if len(set(owned)) != len(owned) or any(self._pool.is_free(block) for block in owned):
            raise BrokenInvariant("a block has two owners")
        if len(owned) + self._pool.free_count != self._pool.blocks:
            raise BrokenInvariant(f"{self._pool.blocks - len(owned) - self._pool.free_count} blocks are lost")
        if locks != self.tree.lock_count():
            raise BrokenInvariant("the tree's locks are not what sequences hold")

    def _take(self, n: int) -> list[int]:
        lacking = n - self._pool.free_count
        if lacking > 0:
            self._pool.free(self.tree.evict(lacking))
        return self._pool.allocate(n)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._block_tokens)

    def _hashes(self, seq: Sequence, blocks: int) -> list[bytes]:
        """Hashes of the first `blocks` whole blocks of seq.ids; computed once each."""
        if len(seq.hashes) < blocks:
            parent = seq.hashes[-1] if seq.hashes else root_hash(self._pool.layout, seq.spec.salt)
            rest = seq.ids[len(seq.hashes) * self._block_tokens : blocks * self._block_tokens]
            seq.hashes += block_hashes(parent, rest, self._block_tokens)
        return seq.hashes[:blocks]
