"""Bad values are refused before anything is sent, by the name of the flag and the limit."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvrelay.cli.main import app


def said(*flags: str) -> str:
    """What `kvrelay load` with these flags says, in one line; it must refuse them."""
    ran = CliRunner().invoke(app, ["load", "--router", "127.0.0.1:9", *flags], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert ran.exit_code == 2, ran.output
    return re.sub(r"[\s│╭╮╰╯─]+", " ", ran.output)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--prompt-tokens 9-3", ["--prompt-tokens 9-3", "low <= high"]),
        ("--output-tokens 0", ["--output-tokens 0", "1 <= low"]),
        ("--prefix-tokens x", ["--prefix-tokens x", "lognormal:MEDIAN"]),
        ("--turn-tokens -1", ["--turn-tokens"]),
        ("--turns 1-3", ["--turns 1-3", "--workload agents"]),
        ("--think soon", ["--think soon"]),
        ("--hits 1.0", ["--hits 1.0", "[0, 1)"]),
        ("--cancel-after inf", ["--cancel-after inf", "finite"]),
        ("--cancel-rate 1.5", ["--cancel-rate", "1"]),
        ("--cancel-rate 0.9 --probe-rate 0.9", ["--cancel-rate", "--probe-rate", "more than 1"]),
        ("--rate nan", ["--rate"]),
        ("--rate inf", ["--rate", "finite"]),
        ("--duration 0", ["--duration"]),
        ("--timeout 0", ["--timeout"]),
        ("--temperature -1", ["--temperature"]),
        ("--concurrency 0", ["--concurrency", "1"]),
        ("--processes 65", ["--processes", "64"]),
        ("--burstiness 0", ["--burstiness", "0.01"]),
        ("--arrival poisson", ["--arrival poisson", "--rate"]),
        ("--arrival trace", ["--arrival trace", "--workload trace"]),
        ("--arrival ramp", ["--ramp", "FROM-TO:SECONDS"]),
        ("--ramp 1-x:3", ["--ramp", "FROM-TO:SECONDS"]),
        ("--ramp 1-inf:3", ["--ramp", "finite"]),
        ("--sweep 1-4", ["--arrival sweep needs --duration"]),
        ("--sweep 4-1 --duration 1", ["--sweep", "low <= high"]),
        ("--sweep 1 --duration 1 --arrival poisson --rate 3", ["--sweep 1", "poisson"]),
        ("--sweep-share 0", ["--sweep-share"]),
        ("--sweep 1 --duration 1 --check", ["--check", "sweep"]),
        ("--sweep 1 --duration 1 --html x.html", ["--html", "sweep"]),
        ("--goodput ttft", ["--goodput", "in ms"]),
        ("--goodput speed=3", ["--goodput", "ttft, ttst, tpot"]),
        ("--cost prefill=cheap", ["--cost", "no price"]),
        ("--against localhost:8000", ["--against", "http://HOST:PORT"]),
        ("--against http://h --check", ["--check", "--against"]),
        ("--against http://h --wan 127.0.0.1:1", ["--wan", "--against"]),
        ("--model m", ["--model", "--against"]),
        ("--vocab 3", ["--vocab", "64"]),
        ("--check-limit 0", ["--check-limit", "1"]),
        ("--workload trace", ["--trace FILE"]),
        ("--trace /no/such/file", ["--trace /no/such/file", "no such file"]),
        ("--conversations 0", ["--duration"]),
        ("--jsonl /no/such/folder/x", ["--jsonl", "no directory /no/such/folder"]),
        ("--html /no/such/folder/x", ["--html", "no directory /no/such/folder"]),
    ],
)  # fmt: skip
def test_a_bad_value_is_refused_by_flag_and_limit(flags: str, words: list[str]) -> None:
    text = said(*flags.split())
    for word in words:
        assert word in text


def test_an_end_before_the_start_of_a_trace_is_refused(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text("")
    text = said("--trace", str(tmp_path / "trace"), "--start", "5", "--end", "2")
    assert "--end 2: expected more than --start 5" in text
