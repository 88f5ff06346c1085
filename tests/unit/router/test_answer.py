"""An answer accepts no gap and no repeat, and knows its own end."""

import pytest

from kvrelay.errors import StageFailed
from kvrelay.text.stream import TextStream
from kvrelay.text.tokenizer import load_tokenizer
from kvrelay.types import FinishReason, Logprobs, Sampling, Source, TokenRun
from services.router.answer import Answer

EOS = 257


def answer(stop: tuple[str, ...] = (), **sampling: object) -> Answer:
    wanted = Sampling(**{"seed": 0, "max_tokens": 10, **sampling})  # type: ignore[arg-type]
    return Answer(wanted, [EOS], TextStream(load_tokenizer("tiny"), stop, wanted.stop_token_ids))


@pytest.mark.parametrize("first_index", [1, 3])
def test_a_gap_or_a_repeat_is_refused(first_index: int) -> None:
    taken = answer()
    taken.take(TokenRun(0, (65, 66)), Source.RELAY)
    with pytest.raises(StageFailed, match=f"token {first_index} where 2 was next"):
        taken.take(TokenRun(first_index, (67,)), Source.RELAY)


@pytest.mark.parametrize(
    ("sampling", "ids", "counted", "reason"),
    [
        ({}, (65, EOS, 66), 2, FinishReason.EOS),
        ({"ignore_eos": True}, (65, EOS, 66), 3, None),
        ({"min_tokens": 2}, (65, EOS, EOS, 66), 3, FinishReason.EOS),
        ({"stop_token_ids": (66,)}, (65, 66, 67), 2, FinishReason.STOP_TOKEN),
        ({"max_tokens": 2}, (65, 66, 67), 2, FinishReason.LENGTH),
        ({"max_tokens": 2}, (65, EOS), 2, FinishReason.EOS),
        ({"max_tokens": 1}, (65,), 1, FinishReason.LENGTH),
    ],
)
def test_the_end_is_found_in_the_ids(
    sampling: dict[str, object], ids: tuple[int, ...], counted: int, reason: FinishReason | None
) -> None:
    taken = answer(**sampling)
    assert taken.take(TokenRun(0, ids), Source.MAIN) == counted
    assert taken.reason == reason
    assert taken.ids == list(ids[:counted])


def test_a_stop_string_wins_over_what_comes_later_in_the_same_run() -> None:
    taken = answer(stop=("BC",), max_tokens=4)
    assert taken.take(TokenRun(0, tuple(b"ABCD")), Source.MAIN) == 3
    assert (taken.reason, taken.stop_string, taken.last_text) == (FinishReason.STOP_STRING, "BC", "")
    assert taken.pop()[0].text == "A"


def test_what_was_held_back_comes_with_the_end() -> None:
    taken = answer(stop=("BC",), max_tokens=2)
    taken.take(TokenRun(0, tuple(b"AB")), Source.MAIN)
    assert (taken.pop()[0].text, taken.last_text) == ("A", "B")


def test_pieces_coalesce_by_source_and_keep_their_indexes() -> None:
    taken = answer()
    taken.take(TokenRun(0, (65,), (Logprobs(-1.0),)), Source.PREFILL)
    taken.take(TokenRun(1, (66,), (Logprobs(-2.0),)), Source.RELAY)
    taken.take(TokenRun(2, (67, 68), (Logprobs(-3.0), Logprobs(-4.0))), Source.RELAY)
    assert taken.unread == 4
    assert [(p.first_index, p.source, p.ids, len(p.logprobs)) for p in taken.pop()] == [
        (0, Source.PREFILL, [65], 1),
        (1, Source.RELAY, [66, 67, 68], 3),
    ]
    assert taken.unread == 0


def test_a_stage_that_counted_other_tokens_is_not_believed() -> None:
    taken = answer()
    taken.take(TokenRun(0, (65,)), Source.RELAY)
    with pytest.raises(StageFailed, match="finished with 2 tokens, 1 were received"):
        taken.end(FinishReason.LENGTH, 2)
    taken.end(FinishReason.LENGTH, 1)
    assert taken.finished


def test_nothing_is_taken_after_the_end() -> None:
    taken = answer(max_tokens=1)
    taken.take(TokenRun(0, (65,)), Source.PREFILL)
    assert taken.take(TokenRun(1, (66,)), Source.RELAY) == 0
