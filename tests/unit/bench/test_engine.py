"""bench.engine's figures: theirs over ours, work over time, and nothing made up where a subject is missing."""

import math

import pytest

from bench.engine import Runs, figures, prefill_flop, step_bytes
from bench.engine_plan import EnginePlan, Measured
from bench.figures import cells
from kvrelay.model.tiny import CONFIG


def runs() -> Runs:
    found = Runs()
    found.measured = {
        "kvrelay": Measured(
            {"b1_512": [20.0, 20.0, 20.0], "b8_512": [40.0], "b1_4096": [30.0]},
            {"512": [1.0], "2048": [4.0], "4096": [9.0]},
            {"mixed_step_ms": [121.0], "chunk_step_ms": [90.0]},
        ),
        "transformers": Measured({"b1_512": [50.0]}, {"2048": [6.0]}),
        "limits": Measured(extra={"gemm_1024": [1e9], "gemm_2048": [2e9], "read_dot": [1e9]}),
    }
    return found


def test_figures_are_ratios_of_medians() -> None:
    found = figures(runs(), CONFIG)
    assert found["decode_b1_vs_transformers"].value == 2.5 and found["decode_b1_vs_transformers"].met
    assert found["prefill_2048_vs_transformers"].value == 1.5
    assert found["decode_4096_vs_512"].value == 1.5
    assert found["mixed"].value == pytest.approx(1.1)
    assert found["prefill_2048_vs_gemm"].value == pytest.approx(prefill_flop(CONFIG, 2048) / 4.0 / 2e9)
    assert found["decode_b1_vs_floor"].value == pytest.approx(0.02 / (step_bytes(CONFIG, 512) / 1e9))


def test_a_missing_peer_gives_no_figure() -> None:
    figure = figures(runs(), CONFIG)["decode_b1_vs_vllm"]
    assert math.isnan(figure.value)
    assert cells(figure.json()) == ["", "", ">= 1.4", "not measured"]


def test_a_plan_reaches_the_subject_as_it_is() -> None:
    plan = EnginePlan(weights="x", decode=((1, 2), (3, 4)))
    assert EnginePlan.parse(plan.argument("x")) == plan
