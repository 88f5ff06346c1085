"""Plain counters of both ends of KV transfer, since the process started. Knows no metrics library."""

from dataclasses import dataclass


@dataclass(slots=True)
class SenderStats:
    """Of all pushes of one stage."""

    blocks_sent: int = 0
    """That crossed and were committed."""
    blocks_cached: int = 0
    """Not sent, because the receiver had them."""
    bytes_saved: int = 0
    """Of `blocks_cached`."""
    resumes: int = 0
    """Lanes opened again after one was lost."""
    committed: int = 0
    ended: int = 0
    failed: int = 0


@dataclass(slots=True)
class ReceiverStats:
    """Of all transfers to one stage."""

    payload_bytes: int = 0
    """Taken, repeated ones included."""
    frames: int = 0
    frames_late: int = 0
    """Refused: their transfer had ended."""
    frames_repeated: int = 0
    """Of blocks that were here already: taken as received, not written."""
    offers_parked: int = 0
    """That had to wait for their leg, or for its KV room."""
    crc_errors: int = 0
    frames_bad: int = 0
    """Refused for anything else than their crc: outside the block, wrong transfer."""
    committed: int = 0
    blocks_received: int = 0
    blocks_cached: int = 0
    bytes_saved: int = 0
    """Of `blocks_cached`."""
