"""The sending end: one link a peer, one push a transfer. Knows no engine and no carrier but its default."""

from typing import Self

from kvrelay.transfer.carrier import CarrierFactory, KvBytes
from kvrelay.transfer.feed import BlockFeed
from kvrelay.transfer.push import PushProgress, PushResult
from kvrelay.transfer.stats import SenderStats
from kvrelay.types import KvTarget, LayoutFingerprint, LinkLoad


class OutgoingTransfer:
    """One push under way."""

    async def done(self) -> PushResult:
        """Waits for the end and says what became of it; raises nothing. May be awaited any number of times."""
        raise NotImplementedError

    def cancel(self) -> None:
        """Ends the push soon; `done` still tells (as ENDED). The pool is not read once `done` has returned."""
        raise NotImplementedError

    def progress(self) -> PushProgress | None:
        """How far the push is; None before the receiver has said what it misses."""
        raise NotImplementedError

    async def progressed(self, seen: PushProgress | None) -> PushProgress | None:
        """Waits until `progress()` differs from `seen` and returns it; None once the push has ended."""
        raise NotImplementedError


class KvSender:
    """All pushes of one stage; an async context manager: leaving cancels what still runs and closes the links.

    `connections`: kept open to each peer. `resume_wait_s`: how long a peer may be out of reach before a push fails.
    """

    def __init__(
        self,
        pool: KvBytes,
        layout: LayoutFingerprint,
        *,
        connections: int = 4,
        resume_wait_s: float = 30.0,
        carrier: CarrierFactory | None = None,
    ) -> None:
        self.stats = SenderStats()
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        raise NotImplementedError

    def push(self, target: KvTarget, request_id: str, feed: BlockFeed) -> OutgoingTransfer:
        """Starts to push the feed's blocks to `target`, as they are published. Raises nothing: `done` tells."""
        raise NotImplementedError

    def links(self) -> list[LinkLoad]:
        """Every peer with its measured goodput and the bytes still to be acknowledged."""
        raise NotImplementedError

    def leftovers(self) -> dict[str, int]:
        """What is still held, by kind; all zero when idle."""
        raise NotImplementedError
