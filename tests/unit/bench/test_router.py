"""bench.router's own parts: null stages behind the bare forwarder, the planner's fleet, the line on a fleet."""

from contextlib import AsyncExitStack

from bench.figures import Figure
from bench.null_stages import BACKLOG
from bench.router import fleet_needs
from bench.router_fleet import FleetSeen, fleet_of, planner_us
from bench.router_systems import Plan, answered, forwarder, null, request
from kvrelay.proto.v1 import router_pb2
from kvrelay.types import Role


async def test_the_forwarder_relays_over_three_legs_and_over_one() -> None:
    async with AsyncExitStack() as stack:
        stages, _ = await null(stack, "stages")
        bare = await forwarder(stack, stages)
        first_s, tokens, messages = await answered(bare.stub, request(Plan(), 8))
        assert first_s > 0
        assert (tokens, messages) == (8, 8)
        _, tokens, messages = await answered(bare.stub, request(Plan(), 20, 1000, router_pb2.PIPELINE_MD))
        assert (tokens, messages) == (20, 20)
        many = request(Plan(), 5000, BACKLOG + 10**7, router_pb2.PIPELINE_MD)
        _, tokens, messages = await answered(bare.stub, many)
        assert tokens == 5000
        assert messages < 5000


def test_the_planner_sees_stages_of_every_role_and_links_between_them() -> None:
    views = fleet_of(64)
    roles = [view.description.role for view in views]
    assert (roles.count(Role.PREFILL), roles.count(Role.RELAY), roles.count(Role.MAIN)) == (16, 16, 32)
    assert planner_us(64) > 0


def test_a_fleets_need_counts_tokens_and_requests() -> None:
    figures = {
        "tokens_per_s": Figure(8000.0),
        "tokens_per_s_coalesced": Figure(80_000.0),
        "router_cpu_ms": Figure(6.0),
    }
    seen = FleetSeen(stages=100, join_s=2.0, report_us=50.0, resident_mb=120.0, stream_kb=40.0)
    assert "128,000 tokens/s" in (line := fleet_needs(figures, seen))
    assert "need 16.6 cores" in line
    assert "and 2.2 do" in line
    assert "1,000 load reports a second: 0.05 of a core" in line
    assert "(3200 of them: 128 MB)" in line
