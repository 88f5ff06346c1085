"""A run from its flags to its exit code: a wrong answer is caught with its index, and every file is written."""

import asyncio
import csv
import json
from pathlib import Path
from typing import Any

import pytest

from kvrelay.cli.load.flags import WorkloadKind
from kvrelay.cli.load.session import Session
from kvrelay.cli.load.shown import Shown
from kvrelay.cli.load.wanted import Said
from kvrelay.cli.load.whom import Whom
from kvrelay.load.arrival import ClosedLoop
from kvrelay.load.hostile import Hostility
from kvrelay.load.sweep import Search
from kvrelay.load.worth import Prices, Slo
from kvrelay.proto.v1 import router_pb2
from tests.unit.cli.load.router import TinyRouter, serving
from tests.unit.load.completions import EVENTS, Server, chunked
from tests.unit.load.completions import serving as openai

TEMPLATE = router_pb2.GenerateRequest()
TEMPLATE.sampling.ignore_eos = True
SAID = Said(WorkloadKind.RANDOM, 6, 1, "0.5", "20-40", "8", 2, "1", "8", "0", 0, "16")


def session(address: str, **changes: Any) -> Session:
    made: dict[str, Any] = {
        "whom": Whom(address, template=TEMPLATE.SerializeToString()), "said": SAID, "arrival": ClosedLoop(2),
        "search": None, "duration_s": None, "grace_s": 5.0, "timeout_s": 20.0, "warm_caches": True, "warm_up_s": 0.0,
        "most_in_flight": None, "processes": 1, "hostility": Hostility(), "check_limit": 0, "shown": Shown(),
    }  # fmt: skip
    return Session(**(made | changes))


def spoiled(request: router_pb2.GenerateRequest, ids: list[int]) -> list[int]:
    """One answer of the six is wrong from index 5 on."""
    return [*ids[:5], (ids[5] + 1) % 256, *ids[6:]] if request.sampling.seed == SEEDS[3] else ids


SEEDS = [one.turns[0].seed for one in SAID.workload(256, 512).workload.conversations()]


async def test_a_wrong_answer_is_caught_with_its_index_and_margin(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "run.jsonl"
    async with serving(TinyRouter(spoiled)) as address:
        assert await session(address, check_limit=32, shown=Shown(jsonl=path)).run() == 1
    said = capsys.readouterr().out
    assert "6 compared, wrong 1" in said
    assert "WRONG" in said and "first differs from the reference at index 5, margin" in said
    lines = [json.loads(line) for line in (await asyncio.to_thread(path.read_text)).splitlines()]
    (wrong,) = [line for line in lines if line["matches"] is False]
    assert (wrong["conversation"], wrong["first_difference"]) == ("conversation-3", 5)
    assert wrong["margin"] > 1e-3


async def test_no_more_are_compared_than_asked_for_and_one_that_ends_early_is_wrong(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with serving(TinyRouter(lambda request, ids: ids[:-1])) as address:
        assert await session(address, check_limit=1).run() == 1
    said = capsys.readouterr().out
    assert "1 compared, wrong 1" in said
    assert "at index 7, one answer is cut short" in said


async def test_a_failed_request_is_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    router = TinyRouter(refuses=lambda request: request.sampling.seed == SEEDS[2])
    async with serving(router) as address:
        assert await session(address).run() == 1
    assert "1 × UNAVAILABLE: no main stage is usable" in capsys.readouterr().out


async def test_every_file_is_written_and_they_agree(tmp_path: Path) -> None:
    jsonl, summary, table, html = (tmp_path / name for name in ("a.jsonl", "a.json", "a.csv", "a.html"))
    shown = Shown(
        Slo.parse("ttft=10s"), Prices.parse("main=2"), jsonl, summary, table, html, "kvrelay load --html <a>.html"
    )
    async with serving(TinyRouter()) as address:
        assert await session(address, shown=shown).run() == 0
    lines, whole, flat, page = await asyncio.to_thread(read, jsonl, summary, table, html)
    assert len(lines) == whole["requests"] == whole["ok"] == int(flat["ok"]) == 6
    assert whole["tokens"] == {"prefill": 6, "relay": 0, "main": 42}
    assert flat["tokens.main"] == "42"
    assert whole["times_ms"]["TTFT"]["count"] == 6
    assert float(flat["times_ms.TTFT.p99"]) == whole["times_ms"]["TTFT"]["p99"]
    assert (whole["good_share"], whole["cost"]) == (1.0, 2.0)
    assert whole["bcr"] == pytest.approx(whole["goodput_per_s"] / 2)
    assert (whole["workload"], whole["seed"], whole["processes"]) == ("random", 1, 1)
    assert "kvrelay load --html &lt;a&gt;.html" in page and "TTFT" in page


def read(jsonl: Path, summary: Path, table: Path, html: Path) -> tuple[list[Any], Any, dict[str, str], str]:
    with table.open(newline="") as file:
        (flat,) = csv.DictReader(file)
    lines = [json.loads(line) for line in jsonl.read_text().splitlines()]
    return lines, json.loads(summary.read_text()), flat, html.read_text()


async def test_a_sweep_prints_its_knee_and_writes_its_steps(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "sweep.json"
    async with serving(TinyRouter()) as address:
        swept = session(address, search=Search(20.0, 40.0), duration_s=0.5, shown=Shown(json=path))
        code = await swept.run()
    document = json.loads(await asyncio.to_thread(path.read_text))
    rates = [step["rate_per_s"] for step in document["steps"]]
    assert rates[0] == 20.0 and max(rates) <= 40.0
    assert code == (0 if document["knee_per_s"] else 1)
    said = capsys.readouterr()
    assert "knee: " in said.out and f"{rates[-1]:.3g}/s, " in said.err


async def test_a_sweep_of_a_router_that_refuses_all_has_no_knee(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(TinyRouter(refuses=lambda request: True)) as address:
        assert await session(address, search=Search(20.0), duration_s=0.5).run() == 1
    assert "knee: below the lowest rate" in capsys.readouterr().out


async def test_another_server_gets_the_same_load(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path, server = tmp_path / "run.json", Server(chunked(EVENTS))
    async with openai(server) as url:
        whom = Whom("127.0.0.1:9", against=url, model="m", vocab=256, template=TEMPLATE.SerializeToString())
        assert await session("", whom=whom, shown=Shown(json=path)).run() == 0
    summary = json.loads(await asyncio.to_thread(path.read_text))
    assert (summary["target"], summary["ok"], summary["tokens"]["server"]) == (url, 6, 36)
    wanted = {one.turns[0].fresh_ids: one.turns[0].seed for one in SAID.workload(256, None).workload.conversations()}
    bodies = [body for _, _, body in server.requests]
    assert {tuple(body["prompt"]): body["seed"] for body in bodies} == wanted
    assert all(body["ignore_eos"] and body["model"] == "m" for body in bodies)
    assert "6, whole 6, failed 0" in capsys.readouterr().out


async def test_another_server_that_fails_is_exit_code_1() -> None:
    async with openai(Server([b"HTTP/1.1 500 Oops\r\nContent-Length: 0\r\n\r\n"])) as url:
        assert await session("", whom=Whom("", against=url)).run() == 1
