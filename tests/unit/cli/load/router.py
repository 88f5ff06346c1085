"""A router with the tiny model behind it, and a fleet that says so; what it answers can be spoiled."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import lru_cache

import grpc
import torch

from kvrelay.engine.reference import generate_reference
from kvrelay.model.weights import LoadedModel, load_model
from kvrelay.proto.v1 import common_pb2, router_pb2, router_pb2_grpc, stage_pb2
from kvrelay.rpc.convert import sampling_from_client

Spoil = Callable[[router_pb2.GenerateRequest, list[int]], list[int]]

INFO = stage_pb2.StageInfo(
    instance_id="m0", role=common_pb2.ROLE_MAIN, model="tiny", vocab_size=256, max_model_tokens=512
)


@lru_cache
def tiny() -> LoadedModel:
    torch.set_num_threads(1)
    return load_model("tiny", block_tokens=16)


class TinyRouter(router_pb2_grpc.RouterServiceServicer):
    """Answers as one engine does, unless it is spoiled; refuses prompts for which `refuses` says so."""

    def __init__(
        self,
        spoil: Spoil = lambda request, ids: ids,
        refuses: Callable[[router_pb2.GenerateRequest], bool] = lambda request: False,
    ) -> None:
        self.spoil = spoil
        self.refuses = refuses
        self.asked = 0

    async def GetFleet(  # type: ignore[override]
        self, request: router_pb2.GetFleetRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> router_pb2.Fleet:
        return router_pb2.Fleet(stages=[router_pb2.FleetStage(info=INFO, usable=True)])

    async def Generate(  # type: ignore[override]
        self, request: router_pb2.GenerateRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncIterator[router_pb2.GenerateReply]:
        self.asked += 1
        if self.refuses(request):
            await context.abort(grpc.StatusCode.UNAVAILABLE, "no main stage is usable")
        ids = self.spoil(request, await asyncio.to_thread(answer, request))
        started = router_pb2.Started(request_id="r", seed=request.sampling.seed)
        yield router_pb2.GenerateReply(started=started)
        for index, token in enumerate(ids):
            source = common_pb2.SOURCE_MAIN if index else common_pb2.SOURCE_PREFILL
            chunk = common_pb2.TokenChunk(first_index=index, ids=[token], source=source)
            yield router_pb2.GenerateReply(output=router_pb2.Output(tokens=chunk))
        usage = router_pb2.Usage(completion_tokens=len(ids), prefill_tokens=1, main_tokens=len(ids) - 1)
        yield router_pb2.GenerateReply(completed=router_pb2.Completed(usage=usage))


def answer(request: router_pb2.GenerateRequest) -> list[int]:
    """One engine's; takes milliseconds, and the model's loading before."""
    prompt: Sequence[int] = list(request.token_ids.ids)
    how = sampling_from_client(
        request.sampling, prompt_tokens=len(prompt), max_model_tokens=512, vocab_size=256, draw_seed=lambda: 1
    )
    return list(generate_reference(tiny(), prompt, how).ids)


@asynccontextmanager
async def serving(router: router_pb2_grpc.RouterServiceServicer) -> AsyncIterator[str]:
    """Its address."""
    server = grpc.aio.server()
    router_pb2_grpc.add_RouterServiceServicer_to_server(router, server)  # type: ignore[arg-type]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)
