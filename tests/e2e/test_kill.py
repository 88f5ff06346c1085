"""kill -9 of each stage while requests run, in a cluster that has only one of each: the hardest case."""

import pytest

from kvrelay.cli.cluster import Cluster
from tests.e2e.asking import check, reference_ids, requests, under_way, whole
from tests.e2e.conftest import Router

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """What one engine answers."""
    return reference_ids(requests(""))


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("prefill-1", 1),
        ("relay-1", 40),
        ("main-1", 40),
        pytest.param("prefill-1", 40, marks=pytest.mark.slow),
        pytest.param("relay-1", 1, marks=pytest.mark.slow),
        pytest.param("main-1", 1, marks=pytest.mark.slow),
    ],
)
async def test_requests_end_when_a_stage_is_killed_and_it_is_usable_when_it_is_back(
    town: Cluster, router: Router, expected: list[list[int]], name: str, tokens: int
) -> None:
    async with under_way(router, requests(f"{name} at {tokens}"), tokens) as flight:
        await flight.grew()
        await town.kill(name)
        try:
            check(await flight.answers(), expected)
            await router.until_idle()
        finally:
            await town.restart(name)
    check(await whole(router, requests(f"{name} back at {tokens}")), expected)


async def test_clients_that_leave_at_any_moment_leave_nothing_behind(town: Cluster, router: Router) -> None:
    for tokens in (0, 1, 20, 60):
        async with under_way(router, requests(f"leaving at {tokens}"), tokens) as flight:
            if tokens:
                await flight.grew()
        await router.until_idle()
