"""`python -m bench.start`: how soon `kvrelay up` is ready, and what memory its services take together. Real weights."""

import asyncio
import json
import os
import re
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import uvloop

from bench.contest import tell
from bench.cpu import cpu_s
from bench.figures import Figure
from bench.index import spread
from bench.output import Report, arguments
from kvrelay.proto.v1 import common_pb2, router_pb2, router_pb2_grpc
from kvrelay.rpc.channels import Purpose, open_channel

ABOUT = (
    "`kvrelay up` with one stage of each role: from its start to the line with the router's address. Memory is the "
    "proportional share (PSS) of the whole process tree, so a page that several map counts once, less the KV pools as "
    "far as they are resident. Weights are on disk and kernels compiled: the first start, which does both, is apart."
)
_READY = re.compile(r"^router (\S+), WAN admin")
_WITHIN_S = 180.0


@dataclass(frozen=True, slots=True)
class Plan:
    """Declared before the run."""

    model: str = "smollm2"
    starts: int = 3
    """After a first one, whose time is reported apart."""
    requests: int = 4
    """Answered before memory is looked at a second time."""
    prompt_tokens: int = 512
    output_tokens: int = 32


QUICK = Plan(starts=1, requests=2, output_tokens=8)


@dataclass(frozen=True, slots=True)
class Member:
    """One process of the tree."""

    name: str
    pss_bytes: int
    private_bytes: int
    """In no other process: of its own, or of a file that nobody else has mapped."""
    anonymous_bytes: int
    """Of no file."""
    cpu_s: float
    """So far."""


def memory_of(rollup: str) -> tuple[int, int, int]:
    """The text of /proc/PID/smaps_rollup -> (PSS, private, anonymous) in bytes."""
    kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in rollup.splitlines()[1:]}
    private = kilobytes["Private_Clean"] + kilobytes["Private_Dirty"]
    return 1024 * kilobytes["Pss"], 1024 * private, 1024 * kilobytes["Anonymous"]


def name_of(argv: list[str]) -> str:
    """What a process of the tree is for."""
    for part in argv:
        if part.startswith(("services.", "kvrelay.")):
            return part.removeprefix("services.").removeprefix("kvrelay.")
    return Path(argv[0]).name.split(" ")[0] if argv else "?"


def members(root: int) -> list[Member]:
    """The process and all below it."""
    found = []
    parent = psutil.Process(root)
    for process in [parent, *parent.children(recursive=True)]:
        memory = memory_of(Path(f"/proc/{process.pid}/smaps_rollup").read_text())
        found.append(Member(name_of(process.cmdline()), *memory, cpu_s(process.pid)))
    return found


@asynccontextmanager
async def up(plan: Plan, cache: str) -> AsyncIterator[tuple[float, str, int]]:
    """-> (seconds until it was ready, the router's address, the process id), while it runs.

    `cache`: the folder of what a first start makes; logs lie there too.
    """
    program = "from kvrelay.cli.main import app; app()"
    argv = [sys.executable, "-c", program, "up", "--model", plan.model, "--router-port", "0", "--log-dir", cache]
    began = time.perf_counter()
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONUNBUFFERED": "1", "XDG_CACHE_HOME": cache},
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(_WITHIN_S):
            async for line in process.stdout:
                if ready := _READY.match(line.decode()):
                    yield time.perf_counter() - began, ready[1], process.pid
                    break
            else:
                raise RuntimeError("`kvrelay up` ended before it was ready")
    finally:
        if process.returncode is None:
            process.terminate()
        await process.communicate()


def touched(smaps: str, size: int) -> int:
    """The text of /proc/PID/smaps -> resident bytes of one anonymous mapping of at least `size` bytes, `size` at most.

    Beside a pool others may lie that the kernel counts as one mapping with it.
    """
    found, counts = 0, False
    for line in smaps.splitlines():
        name, *rest = line.split()
        if "-" in name:
            counts = len(rest) == 4  # no file, no [name]
        elif name == "Size:":
            counts = counts and 1024 * int(rest[0]) >= size
        elif name == "Rss:" and counts:
            found = max(found, min(1024 * int(rest[0]), size))
    return found


def pools_touched(pid: int, pool_bytes: int) -> int:
    """Resident bytes of all KV pools of the tree."""
    maps = [Path(f"/proc/{one.pid}/smaps").read_text() for one in psutil.Process(pid).children(recursive=True)]
    return sum(touched(text, pool_bytes) for text in maps)


async def answer(address: str, plan: Plan) -> int:
    """Some requests over all three legs; -> bytes of one stage's KV pool."""
    async with open_channel(address, Purpose.TOKENS) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        for number in range(plan.requests):
            ids = [(7 * number + n) % 40_000 for n in range(plan.prompt_tokens)]
            sampling = common_pb2.Sampling(max_tokens=plan.output_tokens, temperature=0, ignore_eos=True)
            asked = router_pb2.GenerateRequest(
                token_ids=router_pb2.TokenIds(ids=ids),
                sampling=sampling,
                return_text=False,
                pipeline=router_pb2.PIPELINE_P_RLD_MD,
            )
            async for _ in stub.Generate(asked, timeout=120):
                pass
        stages = (await stub.GetFleet(router_pb2.GetFleetRequest())).stages
    return min(stage.info.pool_blocks * stage.info.block_bytes for stage in stages)


def weights_bytes(cache: Path) -> int:
    """Of the converted weights that the services share."""
    return sum(file.stat().st_size for file in cache.glob("kvrelay/weights/*.f32"))


async def start(plan: Plan, *, quick: bool) -> Report:
    """The first start, then the others."""
    report = Report("start", quick, asdict(plan), emulated=ABOUT)
    with TemporaryDirectory(prefix="kvrelay-bench-") as cache:
        async with up(plan, cache) as (first_s, _, _):
            tell(f"first start: ready after {first_s:.1f} s")
        weights = weights_bytes(Path(cache))
        ready, shares, whole = [], [], []
        for _ in range(plan.starts):
            async with up(plan, cache) as (seconds, address, pid):
                ready.append(seconds)
                began = members(pid)
                pool = await answer(address, plan)
                used, pools = members(pid), pools_touched(pid, pool)
            whole.append(sum(one.pss_bytes for one in used) / weights)
            shares.append((sum(one.pss_bytes for one in used) - pools) / weights)
            cpu = sum(one.cpu_s for one in began)
            tell(f"ready after {seconds:.1f} s, {cpu:.1f} CPU-s; PSS {whole[-1]:.2f}, less pools {shares[-1]:.2f}")
    report.figures["ready_s"] = spread(ready, "<= 20")
    report.figures["first_ready_s"] = Figure(first_s)
    report.figures["pss_vs_weights"] = spread(shares, "<= 4")
    report.figures["pss_vs_weights_pools_too"] = spread(whole)
    report.figures["weights_mb"] = Figure(weights / 1e6)
    report.figures["pools_mb"] = Figure(pools / 1e6)
    rows = [
        [one.name, f"{one.cpu_s:.1f}", *(f"{size / 1e6:.0f}" for size in astuple(then)[1:4])]
        for one, then in zip(began, used, strict=True)
    ]
    columns = ["process", "CPU-s when ready", "PSS, MB, after requests", "private", "anonymous"]
    report.tables.append(("last start", columns, rows))
    report.data["processes"] = [asdict(one) for one in used]
    return report


def main() -> None:
    """The last line is one JSON object."""
    wanted = arguments(__doc__).parse_args()
    report = uvloop.run(start(QUICK if wanted.quick else Plan(), quick=wanted.quick))
    code = report.finish(wanted.out)
    print(json.dumps({name: figure.value for name, figure in report.figures.items()}))
    sys.exit(code)


if __name__ == "__main__":
    main()
