"""What sender and receiver say to each other, and the interface of what carries it. Knows no gRPC, no sockets."""

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from kvrelay.types import BlockRange, KvTarget, LayoutFingerprint


class KvBytes(Protocol):
    """The bytes of KV blocks; `kvrelay.kvcache.pool.KvPool` is one."""

    def read(self, block_id: int) -> memoryview:
        """The block's bytes: a view of them on a CPU, a copy elsewhere."""
        ...

    def write(self, block_id: int, offset: int, payload: bytes | memoryview) -> None:
        """Copies `payload` into the block from byte `offset` on, before it returns."""
        ...

    def view(self, block_id: int) -> memoryview | None:
        """The block's bytes, to be written in place; None where that cannot be."""
        ...


@dataclass(frozen=True, slots=True)
class Offer:
    """Opens a lane: what the sender could send."""

    transfer_id: str
    request_id: str
    layout: LayoutFingerprint
    blocks: int
    """Whole blocks of the prompt."""
    block_bytes: int
    epoch: int
    """The receiver's, as the router knew it."""
    lane: int
    """0 is the transfer's first."""
    bulk: bool = False
    """The sender can send frames through a `BulkDoor`."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A piece of one block. A sender's payload may be a view of the pool, good until `Lane.send` returns."""

    transfer_id: str
    block: int
    """Absolute block index in the prompt."""
    offset: int
    """Of the payload, in bytes of the block."""
    crc32c: int | None
    """None: the carrier is to take it, when that costs least; or it comes behind the payload."""
    payload: bytes | memoryview = field(repr=False)


@dataclass(frozen=True, slots=True)
class BulkDoor:
    """Where a lane's frames may go instead of on its stream."""

    address: str
    """host:port."""
    lane: int
    """The receiver's number of the lane."""
    token: bytes = field(repr=False)
    """Good for one attachment, while the lane lives."""


@dataclass(frozen=True, slots=True)
class Missing:
    """The receiver's answer to an Offer: it lacks these blocks."""

    ranges: tuple[BlockRange, ...]
    bytes: int
    door: BulkDoor | None = None


@dataclass(frozen=True, slots=True)
class Ack:
    """Payload bytes taken so far on this lane."""

    payload_bytes: int


@dataclass(frozen=True, slots=True)
class Committed:
    """All blocks are at the receiver."""

    blocks: int
    """Cached ones included."""
    blocks_received: int
    """Those that crossed."""


class EndReason(enum.StrEnum):
    """Why a receiver takes no (more) frames."""

    RELEASED = "released"
    """The decode leg was closed."""
    UNKNOWN = "unknown"
    """No decode leg asked for it in time."""
    EPOCH = "epoch"
    """The receiver restarted since the route was made."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The receiver will not take (more of) this transfer."""

    reason: EndReason


Answer = Missing | Committed | Ended
Reply = Answer | Ack


OnAck = Callable[[int], None]
"""Is told how many payload bytes the receiver has taken of a lane in all, `receive` being awaited."""


def ignore(payload_bytes: int) -> None:
    """An OnAck."""


class LaneLost(Exception):
    """The lane broke; what is missing may be offered again on another. The text says how it broke."""


class LaneRefused(Exception):
    """The receiver refused the offer for good (another layout, say): no use in trying again."""


class Lane(Protocol):
    """The sender's end of one Push stream. One task sends, one receives."""

    @property
    def wire_bytes(self) -> int:
        """Of frames, headers included, that have left: known after a cancelled `send`, too."""
        ...

    async def send(self, frames: Iterable[Frame]) -> None:
        """Sends the frames of one turn. Returns when more may come.

        Raises LaneLost; `receive` then raises too, and says why.
        """
        ...

    async def receive(self) -> Answer:
        """The receiver's next reply but for acknowledgements. Raises LaneLost, or LaneRefused."""
        ...

    def close(self) -> None:
        """Ends the lane at once, whatever is under way. Idempotent."""
        ...


class Carrier(Protocol):
    """Kept-open connections to one receiver."""

    def open(self, connection: int, offer: Offer, on_ack: OnAck = ignore) -> Lane:
        """A lane on the given connection (0, 1, ...); its offer is under way. Raises nothing: `receive` will.

        `on_ack` is called at once where an acknowledgement is read: a task woken for each would cost more than a frame.
        """
        ...

    async def close(self) -> None:
        """Ends all lanes and connections."""
        ...


class CarrierFactory(Protocol):
    """Makes the carrier to a peer."""

    def __call__(self, target: KvTarget, connections: int) -> Carrier: ...
