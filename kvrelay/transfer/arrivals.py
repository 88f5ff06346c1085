"""Which of a prompt's blocks are at the receiver. Pure bookkeeping: touches no pool and no lane."""

from kvrelay.transfer.frames import Coverage, Span, ranges_of
from kvrelay.types import BlockRange


class Arrivals:
    """`blocks` blocks of `block_bytes` each, of which the first `have` are there from the start."""

    def __init__(self, blocks: int, have: int, block_bytes: int) -> None:
        if not 0 <= have <= blocks:
            raise ValueError(f"have {have} of {blocks} blocks")
        self.blocks = blocks
        self.have = have
        self.leading = have
        """Blocks complete without a gap from block 0 on."""
        self.received = 0
        """Blocks that came and are complete."""
        self._block_bytes = block_bytes
        self._whole = set(range(have))
        self._partial: dict[int, Coverage] = {}
        self._claims: set[Span] = set()
        """Disjoint; being written in place, unchecked as yet."""

    @property
    def complete(self) -> bool:
        """Every block is there."""
        return len(self._whole) == self.blocks

    def is_whole(self, block: int) -> bool:
        """This block is complete."""
        return block in self._whole

    def missing(self) -> tuple[BlockRange, ...]:
        """Blocks that are not complete."""
        return ranges_of(b for b in range(self.leading, self.blocks) if b not in self._whole)

    def claim(self, block: int, offset: int, length: int) -> bool:
        """Takes a span to be written in place, before its checksum is known; whether it may be.

        Nothing that has come or is claimed may lie in it: a damaged frame must not spoil what is good. The claim is
        given up by `unclaim`, and then either by `add` or not at all.
        """
        partial = self._partial.get(block)
        if block in self._whole or self.claimed(block, offset, length):
            return False
        if partial is not None and partial.touches(offset, length):
            return False
        self._claims.add(Span(block, offset, length))
        return True

    def unclaim(self, block: int, offset: int, length: int) -> None:
        """Gives a claim up."""
        self._claims.remove(Span(block, offset, length))

    def claimed(self, block: int, offset: int, length: int) -> bool:
        """A claim touches these bytes."""
        end = offset + length
        return bool(self._claims) and any(c.block == block and c.offset < end and offset < c.end for c in self._claims)

    def add(self, block: int, offset: int, length: int) -> bool:
        """Bytes [offset, offset + length) of `block` are in place; whether that completed the block."""
        if block in self._whole:
            return False
        if length < self._block_bytes:
            coverage = self._partial.setdefault(block, Coverage(self._block_bytes))
            coverage.add(offset, length)
            if not coverage.complete:
                return False
        self._partial.pop(block, None)
        self._whole.add(block)
        self.received += 1
        while self.leading in self._whole:
            self.leading += 1
        return True
