"""How sequences end, with a fake model: lengths, EOS, stop ids, stops in any state, closes."""

import pytest

from kvrelay.engine.events import Admitted, Computed, Finished, Stopped, Tokens
from kvrelay.types import FinishReason
from tests.unit.engine.probe import Probe, prompt, sampling


def test_max_tokens_1_ends_with_the_prompts_step(probe: Probe) -> None:
    probe.add("s", prompt(5), sampling(max_tokens=1))
    probe.step()
    assert [type(one) for one in probe.events["s"]] == [Admitted, Computed, Tokens, Finished]


@pytest.mark.parametrize("index", [0, 1, 3, 4, 7])
def test_eos_and_stop_ids_end_at_every_index_and_are_counted(index: int, probe: Probe) -> None:
    free = probe.add("free", prompt(5)) or probe.expected("free").ids
    assert free[index] not in free[:index], "it would end there"
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
