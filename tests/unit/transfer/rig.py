"""A sender and a receiver in one process, over any carrier, with or without a WAN between. Knows no engine."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc

from kvrelay.rpc.server import grpc_server
from kvrelay.transfer.bulk_carrier import BulkCarriers
from kvrelay.transfer.bulk_server import BulkServer, bulk_server
from kvrelay.transfer.carrier import Answer, Carrier, CarrierFactory, Frame, Lane, Offer, OnAck, ignore
from kvrelay.transfer.feed import BlockFeed
from kvrelay.transfer.grpc_carrier import GrpcCarrier
from kvrelay.transfer.outgoing import OutgoingTransfer
from kvrelay.transfer.receiver import KvReceiver
from kvrelay.transfer.sender import KvSender
from kvrelay.transfer.servicer import SERVICE, KvTransferServicer, add_to_server
from kvrelay.types import KvTarget, LayoutFingerprint, Role
from kvrelay.wan.app import wan_emulator
from kvrelay.wan.emulator import WanEmulator
from kvrelay.wan.settings import WanSettings

EPOCH = 77

# One gRPC poller for the whole session: one that is made and collected with each test may outlive its event loop.
grpc.aio.init_grpc_aio()


def layout_of(block_kib: int) -> LayoutFingerprint:
    """A layout whose blocks have so many KiB (a multiple of 4)."""
    layout = LayoutFingerprint("digest", block_kib // 4, 2, 8, 16, "float64", "none")
    assert layout.block_bytes == block_kib * 1024
    return layout


class FakePool:
    """Blocks of bytes, and a record of what was written."""

    def __init__(self, layout: LayoutFingerprint, blocks: int, *, in_place: bool = False) -> None:
        self.in_place = in_place
        """Its blocks may be written in place, which `written` does not record."""
        self.block_bytes = layout.block_bytes
        self.bytes = bytearray(blocks * self.block_bytes)
        self.written: list[tuple[int, int, int]] = []

    @property
    def touched(self) -> set[int]:
        """Blocks that hold anything."""
        size = self.block_bytes
        return {i for i in range(len(self.bytes) // size) if any(self.bytes[i * size : (i + 1) * size])}

    def read(self, block_id: int) -> memoryview:
        start = block_id * self.block_bytes
        return memoryview(self.bytes)[start : start + self.block_bytes].toreadonly()

    def write(self, block_id: int, offset: int, payload: bytes | memoryview) -> None:
        start = block_id * self.block_bytes + offset
        self.bytes[start : start + len(payload)] = payload
        self.written.append((block_id, offset, len(payload)))

    def view(self, block_id: int) -> memoryview | None:
        if not self.in_place:
            return None
        start = block_id * self.block_bytes
        return memoryview(self.bytes)[start : start + self.block_bytes]


class CarrierKind(Protocol):
    """One carrier under test: its server end, and its client end."""

    in_place: bool
    """Frames are received into the pool itself."""

    def serve(self, receiver: KvReceiver) -> Any:
        """Async context manager -> host:port."""
        ...

    def factory(self) -> CarrierFactory: ...


class GrpcKind:
    """Frames on the Push stream."""

    in_place = False

    @asynccontextmanager
    async def serve(self, receiver: KvReceiver) -> AsyncIterator[str]:
        def register(server: Any) -> None:
            add_to_server(KvTransferServicer(receiver), server)

        async with grpc_server("127.0.0.1:0", register, [SERVICE], grace_s=0.1) as server:
            yield server.address

    def factory(self) -> CarrierFactory:
        return GrpcCarrier


class BulkKind(GrpcKind):
    """Frames on bulk connections."""

    def __init__(self, *, in_place: bool) -> None:
        self.in_place = in_place

    @asynccontextmanager
    async def serve(self, receiver: KvReceiver) -> AsyncIterator[str]:
        async with bulk_server("127.0.0.1:0") as bulk, super().serve(receiver) as address:
            receiver.doors = bulk
            yield address

    def factory(self) -> CarrierFactory:
        return BulkCarriers()


CARRIERS: dict[str, CarrierKind] = {
    "grpc": GrpcKind(),
    "bulk": BulkKind(in_place=True),
    "bulk-staged": BulkKind(in_place=False),
}


class MeddledLane:
    """A lane whose frames pass through `meddle` on their way."""

    def __init__(self, lane: Lane, meddle: Callable[[Frame], Frame]) -> None:
        self._lane = lane
        self._meddle = meddle

    @property
    def wire_bytes(self) -> int:
        return self._lane.wire_bytes

    async def send(self, frames: Iterable[Frame]) -> None:
        await self._lane.send(map(self._meddle, frames))

    async def receive(self) -> Answer:
        return await self._lane.receive()

    def close(self) -> None:
        self._lane.close()


@dataclass
class Watched:
    """Wraps a carrier: counts its lanes by connection, and may change frames."""

    factory: CarrierFactory
    meddle: Callable[[Frame], Frame] | None = None
    opened: list[tuple[int, Offer]] = field(default_factory=list)

    def __call__(self, target: KvTarget, connections: int) -> Carrier:
        return _WatchedCarrier(self, self.factory(target, connections))


@dataclass
class _WatchedCarrier:
    watch: Watched
    carrier: Carrier

    def open(self, connection: int, offer: Offer, on_ack: OnAck = ignore) -> Lane:
        self.watch.opened.append((connection, offer))
        lane = self.carrier.open(connection, offer, on_ack)
        return lane if self.watch.meddle is None else MeddledLane(lane, self.watch.meddle)

    async def close(self) -> None:
        await self.carrier.close()


@dataclass
class Rig:
    """Everything that a test of transfer touches."""

    layout: LayoutFingerprint
    source: FakePool
    pool: FakePool
    receiver: KvReceiver
    sender: KvSender
    watch: Watched
    address: str
    wan: WanEmulator | None
    blocks: int
    stop_serving: Callable[[], Any]

    def target(self, transfer_id: str = "t1", *, epoch: int = EPOCH, instance_id: str = "main-1") -> KvTarget:
        return KvTarget(instance_id, self.address, epoch, transfer_id, Role.MAIN)

    def feed(self, published: int | None = None, ids: Sequence[int] | None = None) -> BlockFeed:
        feed = BlockFeed(range(self.blocks) if ids is None else ids)
        feed.publish(len(feed.block_ids) if published is None else published)
        return feed

    def push(self, transfer_id: str = "t1", feed: BlockFeed | None = None, *, epoch: int = EPOCH) -> OutgoingTransfer:
        return self.sender.push(self.target(transfer_id, epoch=epoch), "r1", feed or self.feed())

    @property
    def arrived(self) -> bool:
        """The receiver's pool holds what the sender's does."""
        return self.pool.bytes == self.source.bytes


@asynccontextmanager
async def rigged(
    carrier: str,
    *,
    blocks: int = 8,
    block_kib: int = 8,
    wan: WanSettings | None = None,
    meddle: Callable[[Frame], Frame] | None = None,
    offer_wait_s: float = 5.0,
    **options: Any,
) -> AsyncIterator[Rig]:
    """A Rig; asserts at the end that neither side holds anything."""
    layout = layout_of(block_kib)
    source = FakePool(layout, blocks)
    source.bytes[:] = os.urandom(len(source.bytes))
    kind = CARRIERS[carrier]
    pool = FakePool(layout, blocks, in_place=kind.in_place)
    receiver = KvReceiver(pool, layout, epoch=EPOCH, offer_wait_s=offer_wait_s)
    watch = Watched(kind.factory(), meddle)
    async with AsyncExitStack() as stack:
        serving = await stack.enter_async_context(AsyncExitStack())
        address = await serving.enter_async_context(kind.serve(receiver))
        emulator = await stack.enter_async_context(wan_emulator(wan)) if wan is not None else None
        if emulator is not None:
            address = await emulator.map_target(address, "b")
            if isinstance(receiver.doors, BulkServer):
                receiver.doors.advertised = await emulator.map_target(receiver.doors.address, "b")
        sender = await stack.enter_async_context(KvSender(source, layout, carrier=watch, **options))
        rig = Rig(layout, source, pool, receiver, sender, watch, address, emulator, blocks, serving.aclose)
        yield rig
        await idle(sender.leftovers, receiver.leftovers)


async def idle(*leftovers: Callable[[], dict[str, int]], within_s: float = 2.0) -> None:
    """Asserts that nothing is left, after the little time that goodbyes take."""
    try:
        await until(lambda: not any(any(of().values()) for of in leftovers), within_s)
    except TimeoutError:
        raise AssertionError([of() for of in leftovers]) from None


async def until(true: Callable[[], object], within_s: float = 10.0) -> None:
    """Waits for something that another party does."""
    async with asyncio.timeout(within_s):
        while not true():  # noqa: ASYNC110 - it is a question to a third party
            await asyncio.sleep(0.002)
