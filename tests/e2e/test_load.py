"""`kvrelay load` as a person runs it, against a whole town: checked, by two processes, with all its files."""

import asyncio
import csv
import json
from pathlib import Path
from typing import Any

import pytest

from kvrelay.cli.cluster import Cluster
from tests.e2e.conftest import Router, program

pytestmark = pytest.mark.asyncio(loop_scope="session")

STAGES = ("prefill", "relay", "main")
FILES = {"--jsonl": "run.jsonl", "--summary-json": "run.json", "--summary-csv": "run.csv", "--html": "run.html"}


def read(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, str]]:
    """The records, the summary, and the summary as CSV has it."""
    with (folder / "run.csv").open(newline="") as file:
        (flat,) = csv.DictReader(file)
    lines = [json.loads(line) for line in (folder / "run.jsonl").read_text().splitlines()]
    return lines, json.loads((folder / "run.json").read_text()), flat


async def test_two_processes_drive_agents_whose_answers_equal_one_engine_s(
    town: Cluster, router: Router, tmp_path: Path
) -> None:
    ran = await program(
        "kvrelay", "load", "--router", town.router_address, "--wan", town.wan_address, "--processes", "2", "--workload",
        "agents", "-n", "6", "--turns", "2-3", "--think", "0-0.1", "--prefix-tokens", "96", "--prompt-tokens", "32-64",
        "--output-tokens", "8-16", "--rate", "20", "--check", "--check-limit", "8", "--goodput", "ttft=20s", "--cost",
        "prefill=2,relay=2,main=1", *(part for flag, name in FILES.items() for part in (flag, str(tmp_path / name))),
        limit_s=80.0,
    )  # fmt: skip
    assert ran.code == 0, ran.err + ran.out
    records, summary, flat = await asyncio.to_thread(read, tmp_path)
    assert 12 <= len(records) <= 18
    assert all(record["ok"] for record in records)
    assert [summary[name] for name in ("ok", "failed", "wrong", "checked")] == [len(records), 0, 0, 8]
    assert {name: int(flat[name]) for name in ("ok", "checked")} == {"ok": len(records), "checked": 8}
    assert sum(record["matches"] is True for record in records) == 8
    assert {record["conversation"] for record in records} == {f"agent-{number}" for number in range(6)}
    for record in records:
        ids = record["output_tokens"]
        assert (
            record["tokens_prefill"] + record["tokens_relay"] + record["tokens_main"] == ids == record["wanted_tokens"]
        )
        assert record["ttft_ms"] <= record["e2el_ms"]
    assert summary["tokens"] == {stage: sum(record[f"tokens_{stage}"] for record in records) for stage in STAGES}
    later = [record for record in records if record["turn"]]
    assert all(record["hit_prefill"] > 0.5 or record["hit_main"] > 0.5 for record in later)
    assert (summary["cost"], summary["good_share"]) == (5.0, 1.0)
    assert summary["link_use"] > 0
    assert "<html" in await asyncio.to_thread((tmp_path / "run.html").read_text)


async def test_hostile_clients_leave_nothing_behind(town: Cluster, router: Router, tmp_path: Path) -> None:
    ran = await program(
        "kvrelay", "load", "--router", town.router_address, "-n", "16", "--workload", "random", "--prompt-tokens",
        "64-300", "--output-tokens", "20-40", "--rate", "20", "--cancel-rate", "0.4", "--cancel-after", "0-0.2",
        "--slow-rate", "0.2", "--slow-pause", "0.02", "--probe-rate", "0.2", "--check", "--jsonl",
        str(tmp_path / "run.jsonl"), limit_s=80.0,
    )  # fmt: skip
    assert ran.code == 0, ran.err + ran.out
    text = await asyncio.to_thread((tmp_path / "run.jsonl").read_text)
    records = [json.loads(line) for line in text.splitlines()]
    assert len(records) == 16
    assert {record["outcome"] for record in records} <= {"ok", "cancelled"}
    assert {record["output_tokens"] for record in records if record["manner"] == "probe"} == {1}
    assert all(record["matches"] is not False for record in records)


async def test_a_trace_with_a_bad_line_is_one_line_that_names_it(town: Cluster, router: Router, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    body = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,40,4\n2023-11-16 18:17:03,many,4\n"
    await asyncio.to_thread(path.write_text, body)
    flags = ("load", "--router", town.router_address, "--trace", str(path), "--format", "azure")
    ran = await program("kvrelay", *flags)
    assert ran.code == 1
    assert f"{path}:3: ContextTokens: 'many' is no count of tokens" in ran.err
    assert "Traceback" not in ran.err
    await asyncio.to_thread(path.write_text, body.replace("many", "50"))
    assert (await program("kvrelay", *flags, "--check")).code == 0
