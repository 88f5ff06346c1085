"""The Push stream at the receiver: protobuf to lanes and back. Knows nothing of what a transfer is."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from kvrelay.errors import ProtocolViolation, StageFailed
from kvrelay.proto.v1 import kv_pb2, kv_pb2_grpc
from kvrelay.transfer import wire
from kvrelay.transfer.carrier import Frame
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
        if first is None or isinstance(first, Frame) or first.WhichOneof("message") != "offer":
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


def add_to_server(servicer: KvTransferServicer, server: grpc.aio.Server) -> None:
    """Registers the service, with a reader of requests that copies no payload: protoc's copies it twice."""
    push = grpc.stream_stream_rpc_method_handler(
        servicer.Push,
        request_deserializer=wire.read_request,
        response_serializer=kv_pb2.PushReply.SerializeToString,
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Push": push}),))


async def _read(requests: Any, lane: ReceivingLane) -> None:
    try:
        async for request in requests:
            if not isinstance(request, Frame):
                raise ProtocolViolation("push: only frames may follow the offer")
            lane.take(request)
        lane.fail(StageFailed("push: the sender closed the lane before the end"))
    except asyncio.CancelledError:
        raise
    except Exception as error:
        lane.fail(error)
