"""The default skew of hit rates is that of agents' traffic."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.load.arrival import ClosedLoop
from kvrelay.load.hits import SKEWED, HitRates, SharedPrefixes
from kvrelay.load.lengths import Lengths
from kvrelay.load.run import LoadOptions, LoadRun
from tests.unit.load.served import BLOCK, Served, ServedTarget


def skewed(seed: int = 1, count: int = 2000, prompt: Lengths | None = None) -> SharedPrefixes:
    lengths = prompt or Lengths(1000, 3000)
    return SharedPrefixes(seed, 50_000, count, HitRates.parse(SKEWED), lengths, Lengths(1, 1))


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 2**32))
def test_the_default_hits_nine_tenths_of_the_tokens_with_the_skew_of_agents(seed: int) -> None:
    """Mean 90 % by tokens; 70-80 % of the requests hit more than 95 %; a small share hits little."""
    shared, total, high, low = 0, 0, 0, 0
    for one in skewed(seed).conversations():
        length = len(one.opening_ids) + len(one.turns[0].fresh_ids)
        rate = len(one.opening_ids) / length
        shared, total = shared + len(one.opening_ids), total + length
        high, low = high + (rate > 0.95), low + (rate < 0.5)
    assert 0.88 <= shared / total <= 0.92
    assert 0.70 <= high / 2000 <= 0.80
    assert 0.04 <= low / 2000 <= 0.10


def test_the_expected_mean_is_nine_tenths() -> None:
    assert abs(HitRates.parse(SKEWED).mean - 0.9) < 0.005


async def test_a_cache_that_was_warmed_hits_what_was_planned_whatever_came_before() -> None:
    workload = skewed(count=40, prompt=Lengths(320, 320))
    served = Served()
    run = LoadRun(LoadOptions(ServedTarget(), workload, ClosedLoop(4)), served)
    assert await run.warm_up() == []
    await run.measure()
    planned = {one.name: len(one.opening_ids) for one in workload.conversations()}
    for record in run.records:
        assert record.cached_main_tokens == planned[record.conversation] // BLOCK * BLOCK
