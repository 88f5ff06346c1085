"""A router that computes nothing: every answer is there at once. `python -m kvrelay.load.null_router` serves one.

It says its port on stdout and ends when its input does. Its messages are made once: it costs less than a client.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import uvloop

from kvrelay.proto.v1 import common_pb2, router_pb2
from kvrelay.rpc.channels import COMMON_OPTIONS

Reply = router_pb2.GenerateReply


class NullRouter:
    """Generate, in bytes."""

    def __init__(self, tokens: int = 4096) -> None:
        self._started = Reply(
            started=router_pb2.Started(request_id="null", seed=1, prompt_tokens=1)
        ).SerializeToString()
        self._outputs = [self._output(index) for index in range(tokens)]

    def _output(self, index: int) -> bytes:
        source = common_pb2.SOURCE_MAIN if index else common_pb2.SOURCE_PREFILL
        chunk = common_pb2.TokenChunk(first_index=index, ids=[40], source=source)
        return Reply(output=router_pb2.Output(tokens=chunk)).SerializeToString()

    async def generate(self, request: router_pb2.GenerateRequest, context: object) -> AsyncIterator[bytes]:
        """max_tokens tokens."""
        count = min(request.sampling.max_tokens, len(self._outputs))
        yield self._started
        for message in self._outputs[:count]:
            yield message
        usage = router_pb2.Usage(completion_tokens=count, prefill_tokens=1, main_tokens=count - 1)
        yield Reply(completed=router_pb2.Completed(usage=usage)).SerializeToString()

    def handler(self) -> grpc.GenericRpcHandler:
        """To be added to a server."""
        generate: grpc.RpcMethodHandler[Any, Any] = grpc.unary_stream_rpc_method_handler(
            self.generate, request_deserializer=router_pb2.GenerateRequest.FromString, response_serializer=None
        )
        return grpc.method_handlers_generic_handler("kvrelay.proto.v1.RouterService", {"Generate": generate})


async def _serve() -> None:
    server = grpc.aio.server(options=COMMON_OPTIONS)
    server.add_generic_rpc_handlers((NullRouter().handler(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve())
