"""The reference stream, and the engine against it with the real tiny model."""

import pytest

from kvrelay.engine.engine import Engine, EngineConfig
from kvrelay.engine.events import Finished, Tokens
from kvrelay.engine.reference import generate_reference, margin_at
from kvrelay.engine.sequence import SequenceSpec
from kvrelay.model.weights import LoadedModel, load_model
from kvrelay.types import FinishReason, Sampling
from tests.fakes import fake_model


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return load_model("tiny", block_tokens=4)


def test_margins_come_with_the_ids_and_equal_those_asked_for_one_by_one() -> None:
    loaded = fake_model()
    how = Sampling(seed=5, max_tokens=6, ignore_eos=True)
    result = generate_reference(loaded, [1, 2, 3], how)
    assert result.reason is FinishReason.LENGTH and len(result.ids) == len(result.margins) == 6
    for index, expected in enumerate(result.margins):
        assert margin_at(loaded, [1, 2, 3], result.ids[:index], index, how) == pytest.approx(expected)
    assert generate_reference(loaded, [1, 2, 3], how, with_margins=False).margins == ()


def test_the_context_limit_of_the_stages_ends_the_reference_too() -> None:
    how = Sampling(seed=5, max_tokens=60, ignore_eos=True)
    assert len(generate_reference(fake_model(), [1, 2, 3], how, max_model_tokens=10).ids) == 7


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_batched_preempting_engine_on_the_tiny_model_equals_the_reference(
    tiny: LoadedModel, temperature: float
) -> None:
    engine = Engine(tiny, EngineConfig(pool_blocks=24, token_budget=7, max_running=8))
    specs = {
        f"s{at}": SequenceSpec(
            f"s{at}", [(7 * at + n // 2) % 250 for n in range(1 + 5 * at)], Sampling(at, 20, temperature=temperature)
        )
        for at in range(6)
    }
    for spec in specs.values():
        engine.add(spec)
    got: dict[str, list[int]] = {name: [] for name in specs}
    while engine.has_work():
        for name, event in engine.step():
            if isinstance(event, Tokens):
                got[name] += event.run.ids
            if isinstance(event, Finished):
                engine.close(name)
        engine.check_integrity()
    engine.check_idle()
    assert engine.load().preemptions > 0
    for name, spec in specs.items():
        assert tuple(got[name]) == generate_reference(tiny, spec.prompt_ids, spec.sampling, with_margins=False).ids
