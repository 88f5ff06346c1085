"""Every trace format: scales, cuts, repeated moments, and bad lines named by number."""

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.load.traces import mooncake
from kvrelay.load.traces.replay import Cut, Replay, TraceFormat, load_rows
from kvrelay.load.traces.row import TraceError

HEADS = {
    TraceFormat.AZURE: "TIMESTAMP,ContextTokens,GeneratedTokens\n",
    TraceFormat.BURSTGPT: "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n",
    TraceFormat.SPLITWISE: "request_type,application_id,arrival_timestamp,batch_size,prompt_size,token_size\n",
    TraceFormat.MOONCAKE: "",
}
KINDS = list(TraceFormat)
TABLES = [kind for kind in KINDS if kind is not TraceFormat.MOONCAKE]


def line(kind: TraceFormat, at_s: float, prompt: int, output: int) -> str:
    """One request, as this format says it."""
    if kind is TraceFormat.MOONCAKE:
        hashes = list(range(-(-prompt // 512)))
        return (
            f'{{"timestamp": {round(at_s * 1e3)}, "input_length": {prompt}, "output_length": {output}, '
            f'"hash_ids": {hashes}}}\n'
        )
    if kind is TraceFormat.AZURE:
        return f"2023-11-16 18:{17 + int(at_s) // 60:02d}:{at_s % 60:010.7f},{prompt},{output}\n"
    if kind is TraceFormat.BURSTGPT:
        return f"{at_s},ChatGPT,{prompt},{output},{prompt + output},Conversation log\n"
    return f"0,1,{at_s},1,{prompt},{output}\n"


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> TraceFormat:
    found: TraceFormat = request.param
    return found


ROWS = [(5.0, 700, 5), (5.0, 30, 7), (6.5, 600, 9), (65.0, 64, 3)]


def written(folder: Path, kind: TraceFormat, extra: str = "") -> Path:
    path = folder / "trace"
    path.write_text(HEADS[kind] + "".join(line(kind, *row) for row in ROWS) + extra)
    return path


def played(path: Path, kind: TraceFormat, cut: Cut) -> list[tuple[float, int, int]]:
    """(arrival, prompt tokens, output tokens) of each."""
    rows, _ = load_rows(path, kind, cut)
    return [
        (round(one.arrival_s or 0.0, 6), len(one.turns[0].fresh_ids), one.turns[0].max_tokens)
        for one in Replay(tuple(rows), cut, 1, 5000).conversations()
    ]


def test_times_start_at_zero_and_repeated_moments_keep_their_order(tmp_path: Path, kind: TraceFormat) -> None:
    path = written(tmp_path, kind)
    assert played(path, kind, Cut()) == [(0.0, 700, 5), (0.0, 30, 7), (1.5, 600, 9), (60.0, 64, 3)]


def test_times_and_lengths_scale(tmp_path: Path, kind: TraceFormat) -> None:
    path = written(tmp_path, kind)
    scaled = played(path, kind, Cut(time_scale=0.1, length_scale=0.5))
    assert scaled == [(0.0, 350, 2), (0.0, 15, 4), (0.15, 300, 4), (6.0, 32, 2)]
    assert played(path, kind, Cut(length_scale=1e-9))[0] == (0.0, 1, 1)


def test_a_part_may_be_cut_out(tmp_path: Path, kind: TraceFormat) -> None:
    path = written(tmp_path, kind)
    assert played(path, kind, Cut(start_s=1.0, end_s=60.0)) == [(0.5, 600, 9)]
    assert played(path, kind, Cut(start_s=1.0, time_scale=2.0)) == [(1.0, 600, 9), (118.0, 64, 3)]
    assert len(played(path, kind, Cut(limit=3))) == 3
    assert played(path, kind, Cut(start_s=100.0)) == []


def test_what_the_fleet_cannot_hold_is_left_out_and_counted(tmp_path: Path, kind: TraceFormat) -> None:
    rows, dropped = load_rows(written(tmp_path, kind), kind, Cut(most_tokens=608))
    assert ([row.prompt_tokens for row in rows], dropped) == ([30, 64], 2)
    rows, dropped = load_rows(written(tmp_path, kind), kind, Cut(most_tokens=609))
    assert ([row.prompt_tokens for row in rows], dropped) == ([30, 600, 64], 1)


def test_requests_out_of_order_are_sorted(tmp_path: Path, kind: TraceFormat) -> None:
    path = written(tmp_path, kind, line(kind, 2.0, 10, 1))
    assert played(path, kind, Cut())[0] == (0.0, 10, 1)


@pytest.mark.parametrize(
    ("prompt", "output"), [("-5", "3"), ("x", "3"), ("1.5", "3"), ("5", "inf"), ("5", "-1"), ("", "3")]
)
@pytest.mark.parametrize("kind", TABLES)
def test_a_length_that_is_none_is_named_with_its_line(
    tmp_path: Path, kind: TraceFormat, prompt: str, output: str
) -> None:
    bad = line(kind, 7.0, 111, 222).replace("111", prompt).replace("222", output)
    with pytest.raises(TraceError, match=r"trace:6: .* is no count of tokens") as failed:
        load_rows(written(tmp_path, kind, bad), kind, Cut())
    assert failed.value.line == 6


@pytest.mark.parametrize("kind", TABLES)
def test_a_line_of_another_shape_is_named(tmp_path: Path, kind: TraceFormat) -> None:
    with pytest.raises(TraceError, match=r"trace:6: 2 columns, the header has"):
        load_rows(written(tmp_path, kind, "1,2\n"), kind, Cut())


@pytest.mark.parametrize("kind", TABLES)
def test_a_time_that_is_none_is_named(tmp_path: Path, kind: TraceFormat) -> None:
    bad = line(kind, 7.0, 1, 1)
    for time in ("2023-11-16 18:17:07.0000000", "7.0"):
        bad = bad.replace(time, "soon")
    with pytest.raises(TraceError, match=r"trace:6: .*'soon' is no time"):
        load_rows(written(tmp_path, kind, bad), kind, Cut())


@pytest.mark.parametrize("kind", TABLES)
def test_a_table_of_another_kind_is_refused_at_its_header(tmp_path: Path, kind: TraceFormat) -> None:
    path = tmp_path / "trace"
    path.write_text("a,b,c\n1,2,3\n")
    with pytest.raises(TraceError, match=r"trace:1: expected a header with"):
        load_rows(path, kind, Cut())
    path.write_text("")
    with pytest.raises(TraceError, match=r"trace:1: expected a header with"):
        load_rows(path, kind, Cut())


GOOD = {"timestamp": "7", "input_length": "5", "output_length": "3", "hash_ids": "[1]"}


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("timestamp", '"soon"', "timestamp: 'soon' is no time"),
        ("timestamp", "-1", "timestamp: -1 is no time"),
        ("timestamp", "NaN", "is no time"),
        ("timestamp", "1e999", "is no time"),
        ("timestamp", "true", "is no time"),
        ("timestamp", "1" + "0" * 400, "too large"),
        ("input_length", "0", "input_length: 0 is no count"),
        ("input_length", "true", "input_length: True is no count"),
        ("output_length", "2.5", "output_length: 2.5 is no count"),
        ("hash_ids", "7", "expected a list"),
        ("hash_ids", '["a"]', "expected a list"),
        ("hash_ids", "[1, 2]", "2 hash_ids for 5 tokens; 1 are due"),
    ],
)
def test_a_bad_field_of_mooncake_s_is_named_with_its_line(
    tmp_path: Path, field: str, value: str, complaint: str
) -> None:
    body = ", ".join(f'"{name}": {text}' for name, text in {**GOOD, field: value}.items())
    with pytest.raises(TraceError, match=complaint) as failed:
        load_rows(written(tmp_path, TraceFormat.MOONCAKE, f"{{{body}}}\n"), TraceFormat.MOONCAKE, Cut())
    assert failed.value.line == 5


@pytest.mark.parametrize("text", ["{", "[1]", "7", "{}", "\x00"])
def test_a_line_that_is_no_object_is_named(tmp_path: Path, text: str) -> None:
    with pytest.raises(TraceError, match="trace:5: "):
        load_rows(written(tmp_path, TraceFormat.MOONCAKE, text + "\n"), TraceFormat.MOONCAKE, Cut())


def test_bytes_that_are_no_text_are_named_with_their_line(tmp_path: Path, kind: TraceFormat) -> None:
    path = written(tmp_path, kind)
    path.write_bytes(path.read_bytes() + b"\xff\xfe\n")
    with pytest.raises(TraceError) as failed:
        load_rows(path, kind, Cut())
    assert failed.value.line == 5 + (kind is not TraceFormat.MOONCAKE)


def test_empty_lines_and_requests_without_an_answer_are_passed_over(tmp_path: Path) -> None:
    path = written(tmp_path, TraceFormat.BURSTGPT, "\n" + line(TraceFormat.BURSTGPT, 9.0, 5, 0) + "\n")
    assert len(played(path, TraceFormat.BURSTGPT, Cut())) == 4


def test_splitwise_may_have_azure_s_columns_and_azure_a_time_zone(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(
        HEADS[TraceFormat.AZURE] + "2024-05-10 00:00:00.009930+00:00,374,44\n2024-05-10 00:00:01+00:00,3,4\n"
    )
    for kind in (TraceFormat.AZURE, TraceFormat.SPLITWISE):
        assert [row[1:] for row in played(path, kind, Cut())] == [(374, 44), (3, 4)]


def test_tables_share_no_tokens_and_are_the_same_again(tmp_path: Path) -> None:
    rows, _ = load_rows(written(tmp_path, TraceFormat.AZURE), TraceFormat.AZURE, Cut())
    made = Replay(tuple(rows), Cut(), 1, 50_000)
    assert list(made.conversations()) == list(made.conversations())
    prompts = [one.turns[0].fresh_ids for one in made.conversations()]
    assert all(one[:8] != other[:8] for one, other in itertools.combinations(prompts, 2))
    assert made.warm_up() == []


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4), min_size=2, max_size=5),
    st.sampled_from([1.0, 0.1, 0.013]),
)
def test_prompts_share_tokens_exactly_as_far_as_they_share_hash_ids(hashes: list[list[int]], scale: float) -> None:
    cut = Cut(length_scale=scale)
    body = "".join(
        f'{{"timestamp": 0, "input_length": {512 * len(ids)}, "output_length": 1, "hash_ids": {ids}}}\n'
        for ids in hashes
    )
    prompts = prompts_of(body, cut)
    for one, other in itertools.combinations(range(len(hashes)), 2):
        equal = len(list(itertools.takewhile(lambda p: p[0] == p[1], zip(hashes[one], hashes[other], strict=False))))
        tokens = round(512 * scale * equal)
        assert prompts[one][:tokens] == prompts[other][:tokens]
        if equal < min(len(hashes[one]), len(hashes[other])):
            assert prompts[one][tokens : tokens + 6] != prompts[other][tokens : tokens + 6]


def prompts_of(body: str, cut: Cut) -> list[tuple[int, ...]]:
    rows = list(mooncake.read(body.splitlines(), "trace"))
    return [Replay(tuple(rows), cut, 1, 50_000).prompt_ids(row) for row in rows]
