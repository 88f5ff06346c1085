"""The whole pipeline with real stages: whatever the route, the tokens are those of one engine."""

import pytest

from kvrelay.proto.v1 import router_pb2
from tests.pipeline.topology import ask, topology


@pytest.mark.parametrize(
    "pipeline",
    [
        router_pb2.PIPELINE_P_RLD_MD,
        router_pb2.PIPELINE_P_MD,
        router_pb2.PIPELINE_P_RLD,
        router_pb2.PIPELINE_MD,
    ],
)
async def test_every_pipeline_answers(pipeline: router_pb2.Pipeline) -> None:
    async with topology() as running:
        got = await running.generate(ask(range(40), max_tokens=20, pipeline=pipeline))
        assert len(got.ids) == 20
        print(got.report)
