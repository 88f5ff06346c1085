"""`kvrelay up`: the whole two-datacenter topology on this host, until Ctrl-C or until one of its processes dies."""

from pathlib import Path
from typing import Annotated

import typer

from kvrelay.cli import options as o
from kvrelay.cli.board import ProcessBoard
from kvrelay.cli.cluster import cluster, obituary
from kvrelay.cli.console import INTERRUPTED, out, run
from kvrelay.cli.spec import ClusterSpec


def up(
    prefill: Annotated[int, typer.Option(help="Prefill stages (site A).", min=0, metavar="N")] = 1,
    relay: Annotated[int, typer.Option(help="Relay-decode stages (site A).", min=0, metavar="N")] = 1,
    main: Annotated[int, typer.Option(help="Main-decode stages (site B).", min=0, metavar="N")] = 1,
    main_local: Annotated[int, typer.Option(help="Main-decode stages at site A.", min=0, metavar="N")] = 0,
    model: Annotated[str, typer.Option(help="smollm2, tiny, a directory, or a .gguf file.")] = "smollm2",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[
        str, typer.Option(help="float32, float64, bfloat16, int8 (weights); none: the device's own.")
    ] = "",
    threads: Annotated[int, typer.Option(help="torch threads a stage.", min=0, metavar="N")] = 1,
    pool_tokens: Annotated[int, typer.Option(help="KV room of a stage.", min=1, metavar="N")] = 16384,
    pace: Annotated[str, typer.Option(help="Emulated accelerator: fixed=MS,token=MS,...")] = "",
    policy: Annotated[str, typer.Option(help="pdd, pd-local or pd-remote.")] = "pdd",
    wan_rate: o.WanRate = "100mbit",
    wan_delay_ms: o.WanDelay = 20.0,
    wan_jitter_ms: Annotated[float, typer.Option(min=0, metavar="MS")] = 0.0,
    host: Annotated[str, typer.Option(help="Where the router is bound.")] = "127.0.0.1",
    router_port: Annotated[int, typer.Option(help="0: any free one.", min=0, max=65535, metavar="N")] = 50050,
    router_set: Annotated[list[str] | None, typer.Option(help="A setting of the router.", metavar="KEY=VALUE")] = None,
    stage_set: Annotated[
        list[str] | None, typer.Option(help="A setting of stages.", metavar="[ROLE.]KEY=VALUE")
    ] = None,
    log_dir: Annotated[Path, typer.Option(help="One file a process.")] = Path("kvrelay-logs"),
) -> None:
    """Run Redis, the WAN emulator, all stages and the router on this host. The WAN is emulated.

    Site B (main decode) is reached only through it. Ctrl-C stops all; if a process dies, all stop (exit code 1).
    """
    spec = ClusterSpec(
        model=model,
        prefill=prefill,
        relay=relay,
        main=main,
        main_local=main_local,
        wan_rate=wan_rate,
        wan_delay_ms=wan_delay_ms,
        wan_jitter_ms=wan_jitter_ms,
        policy=policy,
        device=device,
        dtype=dtype,
        pace=pace,
        pool_tokens=pool_tokens,
        threads=threads,
        router_set=pairs("--router-set", router_set or []),
        stage_set=pairs("--stage-set", stage_set or []),
        host=host,
        router_port=router_port,
        log_dir=log_dir,
    )
    try:
        run(_up(spec))
    except typer.Exit as ended:
        # Ctrl-C is how `up` is meant to end.
        raise typer.Exit(0 if ended.exit_code == INTERRUPTED else ended.exit_code) from None


def pairs(flag: str, texts: list[str]) -> tuple[tuple[str, str], ...]:
    """ "key=value" -> (key, value). typer.BadParameter otherwise."""
    for text in texts:
        if not text.partition("=")[1]:
            raise typer.BadParameter(f"{flag} {text}: expected KEY=VALUE")
    return tuple((text.partition("=")[0], text.partition("=")[2]) for text in texts)


async def _up(spec: ClusterSpec) -> int:
    with ProcessBoard(out) as board:
        async with cluster(spec, board.changed) as running:
            board.say(f"router {running.router_address}, WAN admin {running.wan_address}, logs in {spec.log_dir}")
            board.say(f'try: kvrelay generate --chat "Why is the sky blue?" --router {running.router_address}')
            raise await obituary(await running.failed())
