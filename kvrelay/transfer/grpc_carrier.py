"""The carrier that always works: a lane is a Push stream, a connection is a channel. Knows no scheduling, no pool."""

import asyncio
from collections.abc import Iterable
from typing import Any

import grpc

from kvrelay.errors import InvalidRequest, LayoutMismatch, ProtocolViolation, Unsupported
from kvrelay.proto.v1 import kv_pb2
from kvrelay.rpc.channels import Purpose, open_channel
from kvrelay.rpc.status import from_rpc_error
from kvrelay.transfer import wire
from kvrelay.transfer.carrier import Ack, Answer, Frame, Lane, LaneLost, LaneRefused, Offer, OnAck, Reply, ignore
from kvrelay.types import KvTarget

PUSH = "/kvrelay.proto.v1.KvTransferService/Push"
_FINAL = (LayoutMismatch, ProtocolViolation, InvalidRequest, Unsupported)
"""Answers that trying again would not change."""


class GrpcLane:
    """A Push stream."""

    def __init__(self, channel: grpc.aio.Channel, offer: Offer, peer: str, on_ack: OnAck) -> None:
        # Requests are serialized here: see wire.write_frame.
        push: Any = channel.stream_stream(PUSH, response_deserializer=kv_pb2.PushReply.FromString)
        self._call = push()
        self._offer: Offer | None = offer
        self._peer = peer
        self._on_ack = on_ack
        self.wire_bytes = 0
        """Part of Lane. What gRPC has taken, though it may never leave if the lane ends soon."""

    async def send(self, frames: Iterable[Frame]) -> None:
        """Part of Lane."""
        try:
            for frame in frames:
                message = wire.write_frame(frame)
                self.wire_bytes += len(message) + wire.GRPC_PREFIX_BYTES
                await self._call.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise LaneLost(f"{self._peer}: {error}") from error
        except asyncio.CancelledError:
            if _cancelled_here():
                raise
            raise LaneLost(f"{self._peer}: cancelled by the receiver") from None

    async def receive(self) -> Answer:
        """Part of Lane; the first call sends the offer."""
        while isinstance(reply := await self._read(), Ack):
            self._on_ack(reply.payload_bytes)
        return reply

    async def _read(self) -> Reply:
        try:
            if self._offer is not None:
                offer, self._offer = self._offer, None
                await self._call.write(wire.write_offer(offer).SerializeToString())
            message = await self._call.read()
        except asyncio.InvalidStateError as error:
            raise await self._loss() from error
        except grpc.aio.AioRpcError as error:
            raise _reading(error, self._peer) from error
        except asyncio.CancelledError:
            if _cancelled_here():
                raise
            raise LaneLost(f"{self._peer}: cancelled by the receiver") from None
        if not isinstance(message, kv_pb2.PushReply):
            raise await self._loss()
        return wire.read_reply(message)

    def close(self) -> None:
        """Part of Lane."""
        self._call.cancel()

    async def _loss(self) -> LaneLost | LaneRefused:
        """Why the stream is over, once it is."""
        code, details = await self._call.code(), await self._call.details()
        if code is grpc.StatusCode.OK:
            return LaneLost(f"{self._peer}: the lane ended without an answer")
        metadata = grpc.aio.Metadata()
        trailing = await self._call.trailing_metadata()
        return _reading(grpc.aio.AioRpcError(code, metadata, trailing or metadata, details), self._peer)


class GrpcCarrier:
    """`connections` channels to one peer, dialled on first use, never shared with control."""

    def __init__(self, target: KvTarget, connections: int) -> None:
        self._peer = f"{target.instance_id} at {target.address}"
        self._channels = [open_channel(target.address, Purpose.KV) for _ in range(connections)]

    def open(self, connection: int, offer: Offer, on_ack: OnAck = ignore) -> Lane:
        """Part of Carrier."""
        return GrpcLane(self._channels[connection], offer, self._peer, on_ack)

    async def close(self) -> None:
        """Part of Carrier."""
        for channel in self._channels:
            await channel.close()


def _cancelled_here() -> bool:
    """Whether it is this task that is being cancelled: a status CANCELLED from afar looks the same to grpc.aio."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def _reading(error: grpc.aio.AioRpcError, peer: str) -> LaneLost | LaneRefused:
    known = from_rpc_error(error, peer)
    return LaneRefused(str(known)) if isinstance(known, _FINAL) else LaneLost(str(known))
