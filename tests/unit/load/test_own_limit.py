"""The generator's own limit is measured against a router that does nothing, in another process."""

import grpc
import pytest
from rich.console import Console

from kvrelay.cli.load.own_limit import limit_table
from kvrelay.load.client import ask
from kvrelay.load.own_limit import OwnLimit, null_router, own_limit
from kvrelay.proto.v1 import common_pb2, router_pb2, router_pb2_grpc


async def test_the_null_router_s_answers_are_whole_and_of_the_wanted_length() -> None:
    async with null_router() as address, grpc.aio.insecure_channel(address) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        for tokens in (1, 7):
            request = router_pb2.GenerateRequest(sampling=common_pb2.Sampling(max_tokens=tokens))
            answer = await ask(stub, request, timeout_s=20)
            assert answer.ok, answer.error
            assert len(answer.ids) == tokens


async def test_it_counts_what_was_driven_and_what_it_cost() -> None:
    async with null_router() as address:
        limit = await own_limit(address, 8, 0.3)
    assert limit.output_tokens == 8
    assert limit.requests_per_s > 0
    assert limit.tokens_per_s == pytest.approx(8 * limit.requests_per_s)
    assert limit.cpu_share > 0
    assert limit.tokens_per_core_s == pytest.approx(8 * limit.requests_per_core_s)


def test_half_a_core_stands_for_half_of_the_limit() -> None:
    limit = OwnLimit(10, 100.0, 1000.0, 0.5)
    assert (limit.requests_per_core_s, limit.tokens_per_core_s) == (200.0, 2000.0)
    Console(quiet=True).print(limit_table([limit]))
