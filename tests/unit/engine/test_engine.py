"""The engine with a fake model, case by case: tokens, chunks, the cache."""

import pytest

from kvrelay.engine.events import Admitted, Computed, Finished
from kvrelay.types import FinishReason
from tests.unit.engine.probe import BLOCK, EDGES, Probe, prompt, sampling


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
