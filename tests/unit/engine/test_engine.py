"""The engine with a fake model, case by case: edges, cache, held and loading sequences, ends."""

from collections.abc import Iterator

import pytest

from kvrelay.engine.events import Admitted, CaughtUp, Computed, Finished, Paused, Stopped, Tokens
from kvrelay.errors import InvalidRequest, Overloaded, ProtocolViolation
from kvrelay.types import FinishReason
from tests.unit.engine.probe import BLOCK, Probe, sampling

EDGES = [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1]


@pytest.fixture
def probe() -> Iterator[Probe]:
    one = Probe()
    yield one
    one.close_all()


def prompt(length: int, first: int = 1) -> list[int]:
    return [(first + at) % 64 for at in range(length)]


@pytest.mark.parametrize("length", EDGES)
@pytest.mark.parametrize("hit", [0, 1, 2, 3])
def test_tokens_are_the_references_at_block_edges_with_any_hit(length: int, hit: int, probe: Probe) -> None:
    if hit:
        probe.add("warm", prompt(hit * BLOCK + 1), sampling(max_tokens=1))
        probe.run()
        probe.close("warm")
    probe.add("s", prompt(length))
    probe.run()
    assert probe.of("s", Admitted)[0].cached_tokens == min(hit, (length - 1) // BLOCK) * BLOCK
    assert probe.of("s", Finished) == [Finished(FinishReason.LENGTH, 8)]


@pytest.mark.parametrize("budget", [1, 2, 3, 5, 7, 16])
def test_chunks_of_any_size_give_the_same_tokens(budget: int) -> None:
    probe = Probe(token_budget=budget)
    for at in range(4):
        probe.add(f"s{at}", prompt(5 + 3 * at, at))
    probe.run()
    assert all(len(probe.known[f"s{at}"]) == 8 for at in range(4))
    assert max(sum(rows) for rows in probe.model.batches) <= max(budget, 4 + 1)
    probe.close_all()


def test_decode_rows_run_in_every_step_beside_chunks_of_several_prompts() -> None:
    probe = Probe(token_budget=8, pool_blocks=64)
    probe.add("old", prompt(3), sampling(max_tokens=30))
    probe.step()
    probe.add("a", prompt(9, 20))
    probe.add("b", prompt(9, 40))
    probe.step()
    assert probe.model.batches[-1] == (1, 7)
    probe.step()
    assert probe.model.batches[-1] == (1, 2, 5), "a's tail and b's first chunk share a step"
    probe.run()
    probe.close_all()


def test_computed_counts_whole_prompt_blocks_and_never_shrinks_or_repeats(probe: Probe) -> None:
    probe.add("warm", prompt(BLOCK), sampling(max_tokens=2))
    probe.run()
    probe.add("s", prompt(4 * BLOCK + 2))
    probe.run()
    assert probe.of("s", Admitted)[0].cached_tokens == BLOCK
    assert probe.of("s", Computed) == [Computed(4)]


def test_the_whole_prompt_cached_still_computes_its_last_row(probe: Probe) -> None:
    for name in ("first", "second"):
        probe.add(name, prompt(2 * BLOCK))
        probe.run()
    assert probe.of("second", Admitted)[0].cached_tokens == BLOCK
    assert probe.known["first"] == probe.known["second"]


def test_without_prefix_cache_nothing_is_matched_or_kept() -> None:
    probe = Probe(prefix_cache=False)
    for name in ("first", "second"):
        probe.add(name, prompt(2 * BLOCK + 1))
        probe.run()
        assert probe.of(name, Admitted)[0].cached_tokens == 0
    assert probe.engine.cached_hashes() == []
    probe.close_all()
    assert probe.engine.load().blocks_free == 32


def test_output_blocks_serve_the_next_turn(probe: Probe) -> None:
    probe.add("turn1", prompt(6))
    probe.run()
    answer = probe.known["turn1"]
    probe.add("turn2", prompt(6) + answer + [3, 4])
    probe.run()
    assert probe.of("turn2", Admitted)[0].cached_tokens == 12  # 6 + 8 tokens, the last one's KV was never computed


def test_another_salt_shares_nothing(probe: Probe) -> None:
    probe.add("a", prompt(9), salt="a")
    probe.run()
    probe.add("b", prompt(9), salt="b")
    probe.run()
    assert probe.of("b", Admitted)[0].cached_tokens == 0


def test_two_sequences_computing_one_prefix_keep_the_first_copy(probe: Probe) -> None:
    probe.add("a", prompt(9))
    probe.add("b", prompt(9))
    probe.step()
    assert probe.of("a", Admitted)[0].block_ids != probe.of("b", Admitted)[0].block_ids
    theirs = probe.of("b", Admitted)[0].block_ids
    before = [bytes(probe.engine.pool.read(block)) for block in theirs]
    probe.close("a")
    probe.add("other", prompt(60, 30))  # would take b's blocks if they were free
    probe.run()
    assert [bytes(probe.engine.pool.read(block)) for block in theirs] == before, "told blocks stay until close"


# -- ends ----------------------------------------------------------------------------------------------------------


def test_max_tokens_1_ends_with_the_prompts_step(probe: Probe) -> None:
    probe.add("s", prompt(5), sampling(max_tokens=1))
    probe.step()
    assert [type(one) for one in probe.events["s"]] == [Admitted, Computed, Tokens, Finished]


@pytest.mark.parametrize("index", [0, 1, 3, 4, 7])
def test_eos_and_stop_ids_end_at_every_index_and_are_counted(index: int, probe: Probe) -> None:
    free = probe.add("free", prompt(5)) or probe.expected("free").ids
    if free[index] in free[:index]:
        pytest.skip("the token comes earlier too")
    probe.add("stop", prompt(5), sampling(stop_token_ids=(free[index],)))
    probe.run()
    assert probe.of("stop", Finished) == [Finished(FinishReason.STOP_TOKEN, index + 1)]
    assert tuple(probe.known["stop"]) == free[: index + 1]


def test_eos_ends_an_answer_unless_it_is_ignored(probe: Probe) -> None:
    for seed in range(200):
        how = sampling(seed=seed, ignore_eos=False, max_tokens=40)
        probe.add(f"s{seed}", prompt(3), how)
        if probe.expected(f"s{seed}").reason == FinishReason.EOS:
            break
        probe.close(f"s{seed}")
    probe.run()
    assert probe.of(f"s{seed}", Finished)[0].reason == FinishReason.EOS
    assert probe.known[f"s{seed}"][-1] == 0


def test_the_context_ends_an_answer() -> None:
    probe = Probe(max_model_tokens=10)
    probe.add("s", prompt(7), sampling(max_tokens=50))
    probe.run()
    assert probe.of("s", Finished) == [Finished(FinishReason.LENGTH, 3)]
    probe.close_all()


def test_min_tokens_keeps_eos_and_stop_ids_out(probe: Probe) -> None:
    stops = tuple(range(1, 60))
    probe.add("s", prompt(5), sampling(min_tokens=4, stop_token_ids=stops, max_tokens=20, ignore_eos=False))
    probe.run()
    assert not set(probe.known["s"][:4]) & {0, *stops}


# -- prefill, relay and main as the stages open them -------------------------------------------------------------------


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


# -- extends -----------------------------------------------------------------------------------------------------------


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


def test_a_sequence_stopped_in_any_state_says_so_once_and_samples_no_more(probe: Probe) -> None:
    probe.add("running", prompt(6))
    probe.add("held", prompt(5), held=True)
    probe.step()
    probe.add("queued", prompt(4))
    for name in ("running", "held", "queued", "running"):
        probe.engine.stop(name)
    probe.run()
    assert probe.of("running", Stopped) == [Stopped(1)]
    assert probe.of("held", Stopped) == [Stopped(0)] and probe.of("queued", Stopped) == [Stopped(0)]
    assert len(probe.of("running", Tokens)) == 1 and not probe.of("queued", Admitted)


def test_a_stop_after_the_end_is_ignored(probe: Probe) -> None:
    probe.add("s", prompt(6))
    probe.run()
    probe.engine.stop("s")
    probe.run()
    assert len(probe.of("s", Finished)) == 1 and not probe.of("s", Stopped)


def test_a_close_in_the_tick_of_a_completion_leaves_nothing(probe: Probe) -> None:
    probe.add("s", prompt(6), sampling(max_tokens=1))
    probe.engine.step()
    probe.engine.close("s")
    probe.engine.check_idle()
    probe.engine.close("s")
    probe.known.clear()


# -- room ----------------------------------------------------------------------------------------------------------


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
