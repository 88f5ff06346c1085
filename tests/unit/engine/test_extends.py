"""Extends and budgets, with a fake model."""

import pytest

from kvrelay.engine.events import CaughtUp, Finished, Paused, Tokens
from kvrelay.errors import InvalidRequest, ProtocolViolation
from kvrelay.types import FinishReason
from tests.unit.engine.probe import Probe, prompt, sampling


@pytest.mark.parametrize("rounds", [[1], [3], [4], [5], [1, 1, 1], [4, 3], [2, 0, 5], [6, 1]])
def test_extends_across_block_edges_are_answered_once_each(rounds: list[int], probe: Probe) -> None:
    probe.add("leg", prompt(6), held=True)
    probe.run()
    assert probe.of("leg", CaughtUp) == [CaughtUp(0)]
    for at, count in enumerate(rounds):
        probe.extend("leg", count)
        probe.run()
        assert probe.of("leg", CaughtUp)[1:] == [CaughtUp(sum(rounds[: n + 1])) for n in range(at + 1)]
    probe.extend("leg", 0, resume=True)
    probe.run()
    assert probe.known["leg"] == list(probe.expected("leg").ids)


def test_a_resume_before_the_kv_takes_the_place_of_caught_up(probe: Probe) -> None:
    probe.add("leg", prompt(6), await_kv=True, held=True)
    probe.extend("leg", 2, resume=True)
    probe.run()
    probe.commit("leg")
    probe.run()
    assert probe.of("leg", CaughtUp) == []
    assert probe.of("leg", Finished)


def test_an_extend_at_a_wrong_index_names_both(probe: Probe) -> None:
    probe.add("leg", prompt(6), held=True)
    probe.extend("leg", 2)
    with pytest.raises(ProtocolViolation, match="first_index 3, next index 2"):
        probe.engine.extend("leg", [1], 3, False)
    with pytest.raises(InvalidRequest, match="ids: token id 64"):
        probe.engine.extend("leg", [64], 2, False)
    probe.extend("leg", 0, resume=True)
    with pytest.raises(ProtocolViolation, match="sampling"):
        probe.engine.extend("leg", [1], 2, False)


def test_a_resume_with_all_of_max_tokens_finishes_without_sampling(probe: Probe) -> None:
    probe.add("leg", prompt(6), held=True)
    probe.extend("leg", 8, resume=True)
    probe.run()
    assert probe.of("leg", Finished) == [Finished(FinishReason.LENGTH, 8)]
    assert probe.model.steps == 0


def test_the_budget_pauses_once_also_when_the_resume_reaches_it(probe: Probe) -> None:
    probe.add("a", prompt(6), held=True, output_budget=3)
    probe.add("b", prompt(6), held=True, output_budget=3)
    probe.extend("a", 1, resume=True)
    probe.extend("b", 3, resume=True)
    probe.run()
    assert probe.of("a", Paused) == probe.of("b", Paused) == [Paused(3)]
    assert len(probe.known["a"]) == 3 and not probe.of("b", Tokens)


def test_penalties_count_ids_given_from_outside(probe: Probe) -> None:
    how = sampling(frequency_penalty=2.0, repetition_penalty=1.5, temperature=0.0, max_tokens=20)
    probe.add("leg", prompt(6), how, held=True)
    probe.extend("leg", 9, resume=True)
    probe.run()
    assert probe.known["leg"] == list(probe.expected("leg").ids)
