"""Traces become conversations: equal hash ids give equal tokens, times and lengths scale, bad lines are named."""

from pathlib import Path

import pytest

from kvrelay.load.traces.replay import Cut, Replay, TraceFormat, load_rows
from kvrelay.load.traces.row import TraceError

MOONCAKE = """\
{"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]}
{"timestamp": 0, "input_length": 1030, "output_length": 7, "hash_ids": [0, 1, 3]}
{"timestamp": 2000, "input_length": 600, "output_length": 9, "hash_ids": [4, 5]}
"""


WHOLE = Cut()


def replay(path: Path, cut: Cut = WHOLE) -> Replay:
    rows, _ = load_rows(path, TraceFormat.MOONCAKE, cut)
    return Replay(tuple(rows), cut, 1, 5000)


def test_equal_hash_ids_give_equal_tokens_and_times_repeat(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(MOONCAKE)
    first, second, third = replay(path).conversations()
    ids = [(*one.opening_ids, *one.turns[0].fresh_ids) for one in (first, second, third)]
    assert [len(one) for one in ids] == [1100, 1030, 600]
    assert ids[0][:1024] == ids[1][:1024] and ids[0][1024:1030] != ids[1][1024:]
    assert [one.arrival_s for one in (first, second, third)] == [0.0, 0.0, 2.0]
    assert [one.turns[0].max_tokens for one in (first, second, third)] == [5, 7, 9]


def test_time_and_length_scale(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(MOONCAKE)
    last = list(replay(path, Cut(time_scale=0.5, length_scale=0.5)).conversations())[-1]
    assert last.arrival_s == 1.0
    assert len(last.opening_ids) + len(last.turns[0].fresh_ids) == 300


def test_a_malformed_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(MOONCAKE + '{"timestamp": "soon"}\n')
    with pytest.raises(TraceError, match=r"trace\.jsonl:4: input_length is missing"):
        load_rows(path, TraceFormat.MOONCAKE, Cut())


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (TraceFormat.AZURE, "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,374,44\n"),
        (
            TraceFormat.BURSTGPT,
            "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,374,44,418,API log\n",
        ),
    ],
)
def test_tables_are_read(tmp_path: Path, kind: TraceFormat, text: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    rows, dropped = load_rows(path, kind, Cut())
    (one,) = Replay(tuple(rows), Cut(), 1, 5000).conversations()
    assert len(one.opening_ids) + len(one.turns[0].fresh_ids) == 374
    assert (one.turns[0].max_tokens, dropped) == (44, 0)
