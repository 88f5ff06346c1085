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
    index = "connected" if known.index_connected else "[yellow]not connected[/yellow]"
    out.print(f"policy {known.policy}, in flight {known.in_flight}, prefix index {index}")
    for title, counts in (("requests", known.requests), ("fallbacks", known.fallbacks)):
        for name, count in sorted(counts.items(), key=lambda item: -item[1]):
            out.print(f"{title} {count} × {name}", markup=False)
    return 0 if known.stages else 1


def stages_table(known: router_pb2.Fleet) -> Table:
    """One row a stage."""
    table = Table("stage", "role", "site", "address", "state", "running", "waiting", "KV tokens used", "steps", "links")
    for stage in known.stages:
        info, load = stage.info, stage.load
        block = info.layout.block_tokens
        used = (load.blocks_total - load.blocks_free - load.blocks_cached) * block
        links = ", ".join(f"{link.peer} {link.goodput_bytes_per_s / 1e6:.1f} MB/s" for link in load.links)
        table.add_row(
            info.instance_id,
            common_pb2.Role.Name(info.role).removeprefix("ROLE_").lower(),
            info.site,
            info.address,
            "[green]usable[/green]" if stage.usable else f"[red]{stage.why_not}[/red]",
            f"{load.running}/{load.max_running}",
            str(load.waiting),
            f"{used} of {load.blocks_total * block} (+{load.blocks_cached * block} cached)",
            f"{load.steps}" + (f" ({load.steps_overrun} overran)" if info.pace else ""),
            links,
        )
    return table
