"""How far a prompt's KV blocks have been computed: one producer publishes, many pushes follow. Moves no bytes."""

from collections.abc import Callable, Sequence


class BlockFeed:
    """The prompt's whole blocks, in order, and how many of the first of them are in the pool by now.

    `block_ids`: pool block of each. The producer keeps them allocated and unchanged until every push has ended.
    """

    def __init__(self, block_ids: Sequence[int]) -> None:
        self.block_ids = tuple(block_ids)
        self.published = 0
        """Leading blocks whose bytes are in the pool."""
        self.error: BaseException | None = None
        """Why no more will be published."""
        self._listeners: list[Callable[[], None]] = []

    def publish(self, blocks: int) -> None:
        """The first `blocks` blocks are in the pool now. A smaller number than before changes nothing.

        ValueError: more blocks than there are.
        """
        if blocks > len(self.block_ids):
            raise ValueError(f"published {blocks} of {len(self.block_ids)} blocks")
        if blocks > self.published and self.error is None:
            self.published = blocks
            self._tell()

    def fail(self, error: BaseException) -> None:
        """No more will be published: every push of this feed ends as failed. Only the first error counts."""
        if self.error is None:
            self.error = error
            self._tell()

    def subscribe(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Calls `listener` after every change, until the returned function is called."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def _tell(self) -> None:
        for listener in tuple(self._listeners):
            listener()
