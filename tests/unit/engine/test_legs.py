"""Prefill, relay and main as the stages open them, with a fake model: KV from outside, holds."""

import pytest

from kvrelay.engine.events import Admitted, CaughtUp, Computed, Paused, Stopped, Tokens
from kvrelay.errors import ProtocolViolation
from tests.unit.engine.probe import BLOCK, EDGES, Probe, prompt, sampling


def test_a_prefill_samples_index_0_then_pauses_and_keeps_its_blocks(probe: Probe) -> None:
    probe.add("p", prompt(2 * BLOCK), output_budget=1)
    probe.run()
    assert [type(one) for one in probe.events["p"]] == [Admitted, Computed, Tokens, Paused]
    assert probe.of("p", Paused) == [Paused(1)]
    assert probe.engine.load().running == 1


def test_a_kv_only_prefill_computes_whole_blocks_and_samples_nothing(probe: Probe) -> None:
    probe.add("p", prompt(2 * BLOCK + 3), sample=False, output_budget=1)
    probe.run()
    assert probe.events["p"][1:] == [Computed(2), CaughtUp(0)]
    assert probe.model.tokens == 2 * BLOCK
    probe.add("again", prompt(2 * BLOCK + 3), sample=False)
    probe.run()
    assert probe.of("again", Admitted)[0].cached_tokens == 2 * BLOCK
    assert probe.of("again", CaughtUp) == [CaughtUp(0)]
    assert probe.model.tokens == 2 * BLOCK


@pytest.mark.parametrize("length", EDGES)
@pytest.mark.parametrize("early", [False, True])
def test_a_leg_whose_kv_comes_from_outside_goes_on_from_the_ids(length: int, early: bool, probe: Probe) -> None:
    probe.add("leg", prompt(length), await_kv=True, held=True, reserve_tokens=4)
    probe.run()
    assert probe.model.steps == 0, "nothing is computed before commit"
    if early:
        probe.extend("leg", 1, resume=True)
        probe.run()
        assert probe.model.steps == 0
    probe.commit("leg")
    probe.run()
    if not early:
        assert probe.of("leg", CaughtUp) == [CaughtUp(0)]
        probe.extend("leg", 1, resume=True)
        probe.run()
    assert probe.known["leg"] == list(probe.expected("leg").ids)
    assert probe.model.tokens == max(length % BLOCK, 0) + 7


def test_a_commit_before_admission_or_of_wrong_size_is_refused(probe: Probe) -> None:
    probe.add("leg", prompt(9), await_kv=True, held=True)
    with pytest.raises(ProtocolViolation, match="awaits no KV"):
        probe.engine.commit("leg", 2)
    probe.run()
    with pytest.raises(ProtocolViolation, match="1 blocks committed of 2"):
        probe.engine.commit("leg", 1)
    probe.commit("leg")
    with pytest.raises(ProtocolViolation, match="awaits no KV"):
        probe.engine.commit("leg", 2)


def test_a_full_hit_is_caught_up_in_the_next_step_though_nothing_is_computed(probe: Probe) -> None:
    probe.add("warm", prompt(2 * BLOCK + 1))
    probe.run()
    steps = probe.model.steps
    probe.add("leg", prompt(2 * BLOCK), await_kv=True, held=True)
    probe.step()
    assert probe.of("leg", Admitted)[0].cached_tokens == 2 * BLOCK
    probe.engine.commit("leg", 2)
    assert probe.engine.has_work()
    probe.step()
    assert probe.of("leg", CaughtUp) == [CaughtUp(0)]
    assert probe.model.steps == steps


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("early", [False, True])
def test_a_resume_without_ids_after_a_whole_prompt_from_outside_samples_index_0(cache: bool, early: bool) -> None:
    probe = Probe(prefix_cache=cache)
    probe.add("leg", prompt(2 * BLOCK), await_kv=True, held=True)
    probe.add("other", prompt(2 * BLOCK + 1))
    probe.run()
    if early:
        probe.extend("leg", 0, resume=True)
    probe.commit("leg")
    if not early:
        probe.run()
        probe.extend("leg", 0, resume=True)
    probe.run()
    assert probe.known["leg"] == list(probe.expected("leg").ids)
    probe.close_all()


def test_a_commit_of_blocks_that_another_has_inserted_meanwhile_frees_the_copies(probe: Probe) -> None:
    probe.add("leg", prompt(2 * BLOCK), await_kv=True, held=True)
    probe.run()
    probe.add("other", prompt(2 * BLOCK), sampling(max_tokens=1))
    probe.run()
    free = probe.engine.load().blocks_free
    probe.commit("leg")
    assert probe.engine.load().blocks_free == free + 2
    probe.extend("leg", 1, resume=True)
    probe.run()


@pytest.mark.parametrize("kept", [0, 1, 2, 3])
def test_closing_a_loading_leg_keeps_the_leading_blocks_that_came(kept: int, probe: Probe) -> None:
    probe.add("leg", prompt(3 * BLOCK + 1), await_kv=True, held=True)
    probe.run()
    probe.deliver("leg", kept)
    probe.close("leg", kept_blocks=kept)
    assert len(probe.engine.cached_hashes()) == kept
    probe.add("next", prompt(3 * BLOCK + 1))
    probe.run()
    assert probe.of("next", Admitted)[0].cached_tokens == kept * BLOCK


def test_a_leg_stopped_while_loading_keeps_its_blocks_until_close(probe: Probe) -> None:
    probe.add("leg", prompt(9), await_kv=True, held=True)
    probe.run()
    blocks = probe.of("leg", Admitted)[0].block_ids
    probe.engine.stop("leg")
    probe.run()
    assert probe.of("leg", Stopped) == [Stopped(0)]
    assert not any(probe.engine.pool.is_free(block) for block in blocks)
    probe.engine.commit("leg", 2)
    probe.run()
    assert probe.model.steps == 0
