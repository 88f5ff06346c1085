"""Queues, places and pool blocks, with a fake model: refusals, preemption, what is told of the load."""

import pytest

from kvrelay.engine.events import Admitted, CaughtUp, Finished, Stopped, Tokens
from kvrelay.errors import InvalidRequest, Overloaded, ProtocolViolation
from kvrelay.types import FinishReason
from tests.unit.engine.probe import Probe, prompt, sampling


def test_what_can_never_fit_is_refused_with_field_and_limit() -> None:
    probe = Probe(pool_blocks=4)
    for wrong, message in [([], "prompt_ids: empty"), (prompt(16), "16 tokens; at most 15"), ([64], "token id 64")]:
        with pytest.raises(InvalidRequest, match=message):
            probe.add("s", wrong)
    with pytest.raises(InvalidRequest, match="stop_token_ids"):
        probe.add("s", [1], sampling(stop_token_ids=(-1,)))
    probe.add("s", prompt(15), reserve_tokens=1000)
    probe.run()
    assert probe.of("s", Finished) == [Finished(FinishReason.LENGTH, 1)]
    probe.close_all()


def test_a_full_queue_is_overloaded_and_an_id_in_use_refused() -> None:
    probe = Probe(max_running=1, max_waiting=1)
    probe.add("a", prompt(3))
    with pytest.raises(ProtocolViolation, match="open already"):
        probe.engine.add(probe.specs["a"])
    probe.add("b", prompt(3))
    with pytest.raises(Overloaded, match="at most 2"):
        probe.engine.add(probe.specs["a"].__class__("c", [1], sampling()))
    probe.run()
    with pytest.raises(Overloaded, match="at most 2"):  # ended, but open until they are closed
        probe.engine.add(probe.specs["a"].__class__("c", [1], sampling()))
    probe.close_all()


@pytest.mark.parametrize("ended_by", ["stop", "its end", "an error"])
def test_one_that_has_ended_leaves_its_place_to_the_next_before_it_is_closed(ended_by: str) -> None:
    probe = Probe(max_running=1)
    probe.add("a", prompt(3), sampling(max_tokens=2 if ended_by == "its end" else 100))
    probe.step()
    probe.add("b", prompt(6, first=20))
    probe.step()
    if ended_by == "stop":
        probe.engine.stop("a")
    elif ended_by == "an error":
        probe.engine.fail("a", Overloaded("enough"))
    probe.step()
    assert probe.of("b", Admitted)
    assert probe.engine.load().running == 1
    probe.run()
    assert probe.of("b", Finished)
    probe.close_all()


def test_what_needs_no_model_is_told_before_it_runs(probe: Probe) -> None:
    probe.add("decoding", prompt(6))
    probe.add("ending", prompt(5))
    probe.step()
    probe.engine.stop("ending")
    probe.add("leg", prompt(9), await_kv=True, held=True)
    steps, told = probe.model.steps, []
    after = probe.engine.step(lambda happened: told.append((probe.model.steps, happened)))
    ((at, happened),) = told
    assert at == steps
    assert [(name, type(event)) for name, event in happened] == [("ending", Stopped), ("leg", Admitted)]
    assert [(name, type(event)) for name, event in after] == [("decoding", Tokens)]
    probe.known.clear()
    for name in ("decoding", "ending", "leg"):
        probe.engine.close(name)


def test_preempted_sequences_return_first_and_lose_no_token() -> None:
    probe = Probe(pool_blocks=8)
    for at in range(4):
        probe.add(f"s{at}", prompt(6, 10 * at), sampling(max_tokens=20))
    finished: list[str] = []
    while probe.engine.has_work():
        probe.step()
        for name in list(probe.known):
            if probe.of(name, Finished):
                finished.append(name)
                probe.close(name)
    assert finished == ["s0", "s1", "s2", "s3"]
    assert probe.engine.load().preemptions > 0
    assert all(len(probe.of(f"s{at}", Admitted)) == 1 for at in range(4))
    probe.close_all()


def test_held_loading_and_budgeted_sequences_are_never_preempted() -> None:
    probe = Probe(pool_blocks=12)
    probe.add("held", prompt(8), held=True)
    probe.add("loading", prompt(8, 20), await_kv=True, held=True)
    probe.add("budget", prompt(4, 40), sampling(max_tokens=12), output_budget=12)
    probe.step()
    probe.add("grows", prompt(4, 30), sampling(max_tokens=40))
    tables = {seq.spec.sequence_id: list(seq.table) for seq in probe.engine._scheduler.running[:3]}
    probe.run()
    assert {seq.spec.sequence_id: seq.table for seq in probe.engine._scheduler.running[:3]} == tables
    assert probe.of("budget", Finished) and not probe.of("grows", Finished)
    for name in ("held", "loading", "budget"):
        probe.close(name)
    probe.run()
    assert probe.of("grows", Finished)
    probe.close_all()


def test_held_sequences_that_block_each_other_for_good_fail_clearly_the_youngest_first() -> None:
    probe = Probe(pool_blocks=4)
    for name, first in (("old", 1), ("young", 30)):
        probe.add(name, prompt(8, first), sampling(max_tokens=7), held=True)
    probe.run()
    probe.extend("old", 2)
    probe.extend("young", 2)
    probe.run()
    failure = probe.failed("young")
    assert failure is not None and isinstance(failure.error, Overloaded)
    assert len(probe.of("old", CaughtUp)) == 1
    probe.close("young")
    probe.run()
    assert len(probe.of("old", CaughtUp)) == 2
    probe.extend("old", 0, resume=True)
    probe.run()
    probe.close_all()


def test_flushing_spares_what_sequences_hold(probe: Probe) -> None:
    probe.add("gone", prompt(9, 30))
    probe.run()
    probe.close("gone")
    probe.add("s", prompt(9), sampling(max_tokens=20))
    probe.step()
    assert probe.engine.flush_cache() == 4  # 9 + 8 tokens, 16 of them computed as whole blocks
    assert len(probe.engine.cached_hashes()) == 2
    probe.run()


def test_cache_changes_replay_to_the_cached_hashes() -> None:
    probe = Probe(pool_blocks=8)
    replayed: set[bytes] = set()
    for at in range(6):
        probe.add(f"s{at}", prompt(9, 7 * at))
        probe.run()
        probe.close(f"s{at}")
        for change in probe.engine.take_cache_changes():
            (replayed.add if change.added else replayed.remove)(change.block_hash)
        assert replayed == set(probe.engine.cached_hashes())
    probe.close_all()


def test_the_load_adds_up(probe: Probe) -> None:
    probe.add("a", prompt(9))
    probe.add("leg", prompt(9, 30), await_kv=True, held=True)
    load = probe.engine.load()
    assert (load.running, load.waiting, load.queued_tokens, load.blocks_free) == (0, 2, 9, 32)
    probe.run()
    load = probe.engine.load()
    assert (load.running, load.waiting, load.queued_tokens, load.prompt_tokens) == (1, 0, 0, 18), "one has ended"
    assert load.blocks_total == 32 and load.step_ms > 0 and load.prefill_tokens_per_s > 0 and load.steps == 8
    probe.close("a")
    assert probe.engine.load().blocks_cached == 4
