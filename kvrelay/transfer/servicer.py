"""The Push stream at the receiver: protobuf to lanes and back. Knows nothing of what a transfer is."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from kvrelay.errors import ProtocolViolation, StageFailed
from kvrelay.proto.v1 import kv_pb2, kv_pb2_grpc
from kvrelay.transfer import wire
from kvrelay.transfer.receiver import KvReceiver
from kvrelay.transfer.receiving import ReceivingLane

SERVICE = "kvrelay.proto.v1.KvTransferService"


class KvTransferServicer(kv_pb2_grpc.KvTransferServiceServicer):
    """KvTransferService over a receiver."""

    def __init__(self, receiver: KvReceiver) -> None:
        self._receiver = receiver

    async def Push(self, request_iterator: Any, context: Any) -> AsyncIterator[kv_pb2.PushReply]:
        """One lane. Errors are KvrelayErrors: the server's guard turns them into status."""
        first = await anext(aiter(request_iterator), None)
        if first is None or first.WhichOneof("message") != "offer":
            raise ProtocolViolation("push: the first message must be an offer")
        lane = self._receiver.lane(wire.read_offer(first.offer))
        reader = asyncio.get_running_loop().create_task(_read(request_iterator, lane))
        try:
            async for reply in lane.replies():
                yield wire.write_reply(reply)
        finally:
            lane.close()
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)


async def _read(requests: Any, lane: ReceivingLane) -> None:
    try:
        async for request in requests:
            if request.WhichOneof("message") != "frame":
                raise ProtocolViolation("push: only frames may follow the offer")
            lane.take(wire.read_frame(request.frame))
        lane.fail(StageFailed("push: the sender closed the lane before the end"))
    except asyncio.CancelledError:
        raise
    except Exception as error:
        lane.fail(error)
