"""The commands as a person runs them."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from kvrelay.cli.cluster import Cluster
from tests.e2e.conftest import Router, program

pytestmark = pytest.mark.asyncio(loop_scope="session")

KVRELAY = str(Path(sys.executable).with_name("kvrelay"))


async def test_generate_streams_the_answer_and_says_how_it_was_made(town: Cluster, router: Router) -> None:
    ran = await program(
        "kvrelay", "generate", "The quick brown fox", "--router", town.router_address, "--max-tokens", "12",
        "--seed", "3", "--ignore-eos",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    for word in ("pipeline", "reason", "ttft_ms", "tokens_main", "wan_bytes"):
        assert word in ran.err
    as_json = await program(
        "kvrelay", "generate", "The quick brown fox", "--router", town.router_address, "--max-tokens", "12",
        "--seed", "3", "--ignore-eos", "--json",
    )  # fmt: skip
    facts = json.loads(as_json.out)
    assert len(facts["ids"]) == 12
    assert facts["text"] == ran.out.removesuffix("\n")


async def test_generate_names_what_is_wrong_and_fails(town: Cluster, router: Router) -> None:
    ran = await program("kvrelay", "generate", "--ids", "1,999999", "--router", town.router_address)
    assert ran.code == 1
    assert "INVALID_ARGUMENT: token_ids" in ran.err
    ran = await program("kvrelay", "generate", "--ids", "one", "--router", town.router_address)
    assert ran.code == 2
    assert "--ids" in ran.err


async def test_a_router_that_is_not_there_is_one_line() -> None:
    for command in (["generate", "x"], ["plan", "x"], ["fleet"], ["load"]):
        ran = await program("kvrelay", *command, "--router", "127.0.0.1:9")
        assert ran.code == 1
        assert "UNAVAILABLE" in ran.err
        assert "Traceback" not in ran.err


async def test_plan_fleet_health_and_wan_set_answer(town: Cluster, router: Router) -> None:
    plan = await program("kvrelay", "plan", "hello " * 50, "--router", town.router_address)
    assert plan.code == 0 and "pipeline" in plan.out
    fleet = await program("kvrelay", "fleet", "--router", town.router_address)
    assert fleet.code == 0 and "policy pdd" in fleet.out
    health = await program("kvrelay", "health", town.router_address)
    assert (health.code, health.out) == (0, "SERVING\n")
    wan = await program("kvrelay", "wan-set", town.wan_address, "--rate", "8mbit")
    assert wan.code == 0 and "8.0 Mbit/s" in wan.out


@pytest.mark.parametrize("arrival", [("--concurrency", "3"), ("--rate", "20")])
async def test_load_shows_its_table_and_writes_a_line_per_request(
    town: Cluster, router: Router, tmp_path: Path, arrival: tuple[str, str]
) -> None:
    path = tmp_path / "run.jsonl"
    ran = await program(
        "kvrelay", "load", "--router", town.router_address, *arrival, "-n", "6", "--turns", "2", "--prompt-tokens",
        "64-256", "--output-tokens", "8-16", "--jsonl", str(path),
    )  # fmt: skip
    assert ran.code == 0, ran.err
    for word in ("TTFT", "ITL", "E2EL", "throughput", "tokens by stage"):
        assert word in ran.out
    records = [json.loads(line) for line in await asyncio.to_thread(lambda: path.read_text().splitlines())]
    assert len(records) == 12
    assert all(record["ok"] for record in records)
    later = [record for record in records if record["turn"] == 1]
    assert all(record["hit_prefill"] > 0 or record["hit_main"] > 0 for record in later)


@asynccontextmanager
async def up(tmp_path: Path, *flags: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """`kvrelay up` as a process; killed at the end of the block if it still lives."""
    process = await asyncio.create_subprocess_exec(
        KVRELAY, "up", "--model", "tiny", "--router-port", "0", "--log-dir", str(tmp_path / "logs"), *flags,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


async def until_it_says(process: asyncio.subprocess.Process, word: str) -> list[str]:
    """Its output so far, the line with `word` included."""
    assert process.stdout is not None
    lines = []
    async with asyncio.timeout(60):
        async for raw in process.stdout:
            lines.append(raw.decode())
            if word in lines[-1]:
                return lines
    raise AssertionError(f"it ended without a word of {word!r}: {''.join(lines)}")


def children_of(process: asyncio.subprocess.Process) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that have not ended within 5 s; a zombie has ended."""
    _, left = psutil.wait_procs(processes, timeout=5)
    return [process for process in left if process.status() != psutil.STATUS_ZOMBIE]


async def test_up_shows_a_line_per_process_and_ctrl_c_leaves_none(tmp_path: Path) -> None:
    async with up(tmp_path) as process:
        lines = await until_it_says(process, "try: kvrelay generate")
        ready = {line.split()[0] for line in lines if line.rstrip().endswith("ready")}
        assert ready == {"redis", "wan", "prefill-1", "relay-1", "main-1", "router"}
        children = children_of(process)
        assert len(children) == 6
        process.send_signal(signal.SIGINT)
        _, err = await asyncio.wait_for(process.communicate(), 20)
        assert process.returncode == 0, err
        assert alive(children) == []


async def test_up_stops_all_and_shows_the_log_when_a_process_dies(tmp_path: Path) -> None:
    async with up(tmp_path, "--main", "0", "--prefill", "0") as process:
        await until_it_says(process, "try: kvrelay generate")
        children = children_of(process)
        next(child for child in children if "services.relay_decode" in child.cmdline()).kill()
        _, err = await asyncio.wait_for(process.communicate(), 20)
        assert process.returncode == 1
        assert "relay-1 was killed by SIGKILL" in err.decode()
        assert alive(children) == []


async def test_a_killed_up_leaves_no_process(tmp_path: Path) -> None:
    async with up(tmp_path, "--main", "0") as process:
        await until_it_says(process, "prefill-1")
        children = children_of(process)
        assert children
        process.kill()
        await process.communicate()
        assert alive(children) == []


async def test_up_with_a_missing_model_names_it(tmp_path: Path) -> None:
    async with up(tmp_path, "--main", "0", "--relay", "0", "--model", str(tmp_path / "none.gguf")) as process:
        _, err = await asyncio.wait_for(process.communicate(), 40)
        assert process.returncode == 1
        assert "none.gguf" in err.decode()


async def test_up_on_a_port_in_use_is_one_line(town: Cluster, tmp_path: Path) -> None:
    port = town.router_address.rsplit(":", 1)[1]
    ran = await program("kvrelay", "up", "--model", "tiny", "--router-port", port, "--log-dir", str(tmp_path))
    assert ran.code == 1
    assert f"port {port} on 127.0.0.1 is in use" in ran.err
    assert ran.err.count("\n") == 1
