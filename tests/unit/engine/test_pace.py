"""The pace: parsing, arithmetic, and the rest of a step."""

import time

import pytest

from kvrelay.engine.engine import Engine, EngineConfig
from kvrelay.engine.pace import Pace, sleep_rest
from kvrelay.engine.sequence import SequenceSpec
from kvrelay.errors import InvalidRequest
from kvrelay.types import Sampling
from tests.fakes import fake_model


def test_any_subset_in_any_order_is_read() -> None:
    assert Pace.parse("") == Pace() and not Pace.parse("")
    assert Pace.parse("token=0.5, fixed=20") == Pace(fixed=20, token=0.5)
    assert Pace.parse("fixed=1,token=2,context=0.001,sequence=0.2") == Pace(1, 2, 0.001, 0.2)


@pytest.mark.parametrize(
    "text", ["fast", "speed=3", "fixed=", "fixed=x", "fixed=-1", "fixed=nan", "fixed=inf", "fixed=1,fixed=2"]
)
def test_what_is_no_pace_is_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidRequest, match="pace"):
        Pace.parse(text)


def test_a_step_costs_the_sum_of_its_parts() -> None:
    assert Pace(10, 0.5, 0.01, 2).step_ms(new_tokens=4, context_tokens=300, sequences=3) == pytest.approx(
        10 + 2 + 3 + 6
    )


def test_the_rest_is_slept_and_an_overrun_is_told() -> None:
    slept: list[float] = []
    began = time.perf_counter()
    assert not sleep_rest(50.0, began, slept.append)
    assert 0.05 - (time.perf_counter() - began) <= slept[0] <= 0.05
    assert sleep_rest(50.0, time.perf_counter() - 1, slept.append)
    assert len(slept) == 1


def test_a_paced_engine_takes_its_time_and_counts_overruns() -> None:
    engine = Engine(fake_model(), EngineConfig(pool_blocks=8, pace=Pace(fixed=5, token=1)))
    engine.add(SequenceSpec("s", [1, 2, 3, 4, 5], Sampling(seed=0, max_tokens=1)))
    began = time.perf_counter()
    engine.step()
    assert time.perf_counter() - began >= 0.010
    assert engine.load().steps == 1 and engine.load().steps_overrun == 0
    hasty = Engine(fake_model(), EngineConfig(pool_blocks=8, pace=Pace(fixed=1e-6)))
    hasty.add(SequenceSpec("s", [1, 2, 3], Sampling(seed=0, max_tokens=1)))
    hasty.step()
    assert hasty.load().steps_overrun == 1
