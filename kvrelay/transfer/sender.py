"""The sending end: one link a peer, one push a transfer. Knows no engine; of carriers only the default one's name."""

import asyncio
import time
from typing import Self

from kvrelay.transfer.carrier import CarrierFactory, KvBytes, Offer
from kvrelay.transfer.feed import BlockFeed
from kvrelay.transfer.frames import MAX_PAYLOAD_BYTES
from kvrelay.transfer.grpc_carrier import GrpcCarrier
from kvrelay.transfer.link import Link
from kvrelay.transfer.outgoing import OutgoingTransfer
from kvrelay.transfer.push import PushOutcome
from kvrelay.transfer.stats import SenderStats
from kvrelay.types import KvTarget, LayoutFingerprint, LinkLoad

FRAME_BYTES = 256 * 1024
"""Payload of a frame: large enough to be cheap, small enough for a window of two on a thin link."""
LINK_IDLE_S = 900.0
"""A link without a push for so long is closed when another is opened: peers come and go."""


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
        frame_bytes: int = FRAME_BYTES,
        carrier: CarrierFactory = GrpcCarrier,
    ) -> None:
        if not 0 < frame_bytes <= MAX_PAYLOAD_BYTES:
            raise ValueError(f"frame_bytes: must be 1-{MAX_PAYLOAD_BYTES}, got {frame_bytes}")
        self.stats = SenderStats()
        self._pool = pool
        self._layout = layout
        self._connections = connections
        self._resume_wait_s = resume_wait_s
        self._frame_bytes = min(frame_bytes, layout.block_bytes)
        self._carrier = carrier
        self._links: dict[tuple[str, str], Link] = {}
        self._pushes: dict[asyncio.Task[None], OutgoingTransfer] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for transfer in self._pushes.values():
            transfer.cancel()
        await asyncio.gather(*self._pushes, *self._closing)
        for link in self._links.values():
            await link.carrier.close()
        self._links.clear()

    def push(self, target: KvTarget, request_id: str, feed: BlockFeed) -> OutgoingTransfer:
        """Starts to push the feed's blocks to `target` as they are published; `done` of the result tells the end.

        ValueError: the target's address is not host:port.
        """
        offer = Offer(
            transfer_id=target.transfer_id,
            request_id=request_id,
            layout=self._layout,
            blocks=len(feed.block_ids),
            block_bytes=self._layout.block_bytes,
            epoch=target.epoch,
            lane=0,
        )
        transfer = OutgoingTransfer(
            self._link(target),
            self._pool,
            feed,
            offer,
            connections=self._connections,
            resume_wait_s=self._resume_wait_s,
            stats=self.stats,
        )
        task = asyncio.get_running_loop().create_task(self._run(transfer))
        self._pushes[task] = transfer
        task.add_done_callback(self._pushes.pop)
        return transfer

    def links(self) -> list[LinkLoad]:
        """Every peer with its measured goodput and the bytes still to be acknowledged."""
        return [LinkLoad(x.peer, x.window.goodput, x.pending_bytes, x.pushes) for x in self._links.values()]

    def leftovers(self) -> dict[str, int]:
        """What is still held, by kind; all zero when idle."""
        return {
            "outgoing_transfers": len(self._pushes),
            "pending_push_bytes": sum(link.pending_bytes for link in self._links.values()),
            "bytes_in_flight": sum(link.window.in_flight for link in self._links.values()),
        }

    async def _run(self, transfer: OutgoingTransfer) -> None:
        await transfer.run()
        result = await transfer.done()
        stats = self.stats
        stats.blocks_sent += result.blocks_sent
        stats.blocks_cached += result.blocks_cached
        stats.bytes_saved += result.blocks_cached * self._layout.block_bytes
        match result.outcome:
            case PushOutcome.COMMITTED:
                stats.committed += 1
            case PushOutcome.ENDED:
                stats.ended += 1
            case PushOutcome.FAILED:
                stats.failed += 1

    def _link(self, target: KvTarget) -> Link:
        key = (target.instance_id, target.address)
        if key not in self._links:
            self._close_idle_links()
            carrier = self._carrier(target, self._connections)
            self._links[key] = Link(target.instance_id, carrier, self._connections, self._frame_bytes)
        return self._links[key]

    def _close_idle_links(self) -> None:
        now = time.monotonic()
        for key, link in list(self._links.items()):
            if not link.pushes and now - link.idle_since > LINK_IDLE_S:
                del self._links[key]
                task = asyncio.get_running_loop().create_task(link.carrier.close())
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)
