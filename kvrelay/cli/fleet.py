"""`kvrelay fleet`: the stages that a router knows, their load, and what it has served."""

from rich.table import Table

from kvrelay.cli import options as o
from kvrelay.cli.console import out, run
from kvrelay.proto.v1 import common_pb2, router_pb2, router_pb2_grpc
from kvrelay.rpc.channels import open_channel


def fleet(router: o.Router = o.DEFAULT_ROUTER) -> None:
    """Show the router's stages with their load, and requests and fallbacks so far."""
    run(_fleet(router))


async def _fleet(address: str) -> int:
    async with open_channel(address) as channel:
        known = await router_pb2_grpc.RouterServiceStub(channel).GetFleet(router_pb2.GetFleetRequest(), timeout=10.0)
    out.print(stages_table(known))
    for note in notes(known):
        out.print(note, markup=False, soft_wrap=True)
    return 0 if known.stages else 1


def stages_table(known: router_pb2.Fleet) -> Table:
    """One row a stage; KV held, cached and room in tokens."""
    table = Table("stage", "role", "site", "address", box=None, pad_edge=False)
    for name in ("usable", "running", "waiting", "held", "cached", "room"):
        table.add_column(name, justify="right", no_wrap=True)
    for stage in known.stages:
        info, load = stage.info, stage.load
        block = info.layout.block_tokens
        table.add_row(
            info.instance_id,
            common_pb2.Role.Name(info.role).removeprefix("ROLE_").lower(),
            info.site,
            info.address,
            "[green]yes[/green]" if stage.usable else "[red]no[/red]",
            f"{load.running}/{load.max_running}",
            str(load.waiting),
            str((load.blocks_total - load.blocks_free - load.blocks_cached) * block),
            str(load.blocks_cached * block),
            str(load.blocks_total * block),
        )
    return table


def notes(known: router_pb2.Fleet) -> list[str]:
    """What does not fit the table, a line each."""
    lines = []
    for stage in known.stages:
        name = stage.info.instance_id or stage.info.address
        if not stage.usable:
            lines.append(f"{name} is not usable: {stage.why_not}")
        if stage.info.pace:
            steps, overran = stage.load.steps, stage.load.steps_overrun
            lines.append(f"{name} is paced ({stage.info.pace}): {overran} of {steps} steps overran")
        for link in stage.load.links:
            rate, pending = link.goodput_bytes_per_s / 1e6, link.pending_bytes / 1e6
            lines.append(f"{name} → {link.peer}: {rate:.1f} MB/s, {pending:.1f} MB pending")
    index = "connected" if known.index_connected else "not connected"
    lines.append(f"policy {known.policy}, {known.in_flight} in flight, prefix index {index}")
    for title, counts in (("request", known.requests), ("fallback", known.fallbacks)):
        lines += [f"{count} × {title} {name}" for name, count in sorted(counts.items(), key=lambda item: -item[1])]
    return lines
