"""One frame's payload on its way from a socket into the pool. Decides anew, for every read, where it may go."""

from typing import TYPE_CHECKING

from kvrelay.transfer.carrier import Frame
from kvrelay.transfer.frames import checksum

if TYPE_CHECKING:
    from kvrelay.transfer.receiving import ReceivingLane

READ_BYTES = 256 * 1024
"""Into the pool at once, at most: what has come is still in the processor's cache when its checksum is taken."""


class Landing:
    """`buffer` and `came` in turn until nothing is `left`, then `finish`; or `abandon`, at any time.

    `frame`: without payload and checksum. `place`: its bytes in the pool, claimed by the lane; None: it goes to
    `staging`, to be copied when its checksum is known. `staging` takes all of it if it is `wanted`, else what must be
    thrown away.
    """

    __slots__ = ("_crc", "_into", "_lane", "_piece", "_room", "_staging", "frame", "in_place", "left", "length")

    def __init__(
        self,
        lane: "ReceivingLane",
        frame: Frame,
        length: int,
        *,
        place: memoryview | None,
        wanted: bool,
        staging: memoryview,
    ) -> None:
        self.frame = frame
        self.length = length
        self.in_place = place is not None
        self.left = length
        """Bytes of the payload that are still to come."""
        self._lane = lane
        self._into = place if place is not None else staging if wanted else None
        self._staging = staging
        self._room = staging
        self._piece = -(-length // -(-length // READ_BYTES)) if length else 0
        self._crc = 0

    def buffer(self) -> memoryview:
        """Room for what comes next: never in the pool, once the lane may not write there any more."""
        count = min(self.left, self._piece)
        if not self._lane.writable:
            self.abandon()
        if self._into is None:
            return self._staging[:count]
        at = self.length - self.left
        self._room = self._into[at : at + count]
        return self._room

    def came(self, count: int) -> None:
        """So many bytes are in what `buffer` returned."""
        if self._into is not None:
            room = self._room
            self._crc = checksum(room if count == len(room) else room[:count], self._crc)
        self.left -= count

    def finish(self, crc32c: int) -> None:
        """The payload is whole, and this is what its checksum should be. Raises BadFrame."""
        if self._into is None:
            self._lane.dropped()
        else:
            self._lane.landed(self, self._into[: self.length], good=self._crc == crc32c)

    def abandon(self) -> None:
        """The rest of the payload, if it comes, goes nowhere. Idempotent."""
        if self.in_place:
            self._lane.unclaim(self)
            self.in_place = False
        self._into = None
