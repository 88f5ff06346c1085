"""`kvrelay top`: a router's fleet, live, at 80 columns. Asks GetFleet only; its rates are between two answers."""

import asyncio
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated

import grpc
import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvrelay.cli import options as o
from kvrelay.cli.console import out, run
from kvrelay.load.client import status_text
from kvrelay.proto.v1 import common_pb2, router_pb2, router_pb2_grpc
from kvrelay.rpc.channels import open_channel

BAR = 12
"""Columns of a pool's bar."""
REASONS = 6
"""Fallback reasons and pipelines shown; the rest is in `kvrelay fleet`."""


def top(
    router: o.Router = o.DEFAULT_ROUTER,
    interval: Annotated[float, typer.Option(help="Seconds between two looks.", min=0.1, metavar="S")] = 1.0,
) -> None:
    """Watch a router's fleet: stages, pools, cache hits, links, pipelines, stalls, fallbacks. Ctrl-C ends it."""
    run(_top(router, interval))


async def _top(address: str, interval_s: float) -> int:
    async with open_channel(address) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        seen = [Look(await stub.GetFleet(router_pb2.GetFleetRequest(), timeout=10.0))]
        if not out.is_terminal:
            out.print(picture(address, seen[0], seen[0]))
            return 0
        with Live(picture(address, seen[0], seen[0]), console=out, screen=True, auto_refresh=False) as live:
            while True:
                await asyncio.sleep(interval_s)
                try:
                    seen = [seen[-1], Look(await stub.GetFleet(router_pb2.GetFleetRequest(), timeout=5.0))]
                    said = ""
                except grpc.aio.AioRpcError as error:
                    said = f"{status_text(error)}; below is what was seen last"
                live.update(picture(address, seen[0], seen[-1], said), refresh=True)


@dataclass(frozen=True, slots=True)
class Look:
    """What the router said, and when."""

    fleet: router_pb2.Fleet
    at_s: float = field(default_factory=time.monotonic)

    def total(self, *names: str) -> float:
        """Sum of the counters of these names, whatever their labels."""
        return sum(
            value for name, value in self.fleet.totals.items() if name in names or name.startswith(_under(names))
        )

    def labelled(self, name: str) -> dict[str, float]:
        """A counter by label."""
        return {key.partition("/")[2]: value for key, value in self.fleet.totals.items() if key.startswith(f"{name}/")}


def _under(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{name}/" for name in names)


def picture(address: str, before: Look, now: Look, said: str = "") -> Group:
    """One screen. `before`: the look that rates are counted from; `said`: why there is no newer one."""
    known = now.fleet
    index = "up" if known.index_connected else "[red]down[/red]"
    head = f"[bold]{address}[/bold]  policy {known.policy}  {known.in_flight} in flight  index {index}"
    rows: list[RenderableType] = [Text.from_markup(head, overflow="ellipsis")]
    if said:
        rows.append(Text(said, style="red"))
    rows += [_stages(known), *(Text(line, style="red", overflow="ellipsis") for line in _unusable(known)), Text()]
    if links := list(_links(before, now)):
        table = Table("link", box=None, pad_edge=False, header_style="dim")
        for name in ("sent", "goodput", "use", "backlog"):
            table.add_column(name, justify="right", no_wrap=True)
        for row in links:
            table.add_row(*row)
        rows += [table, Text()]
    facts = Table(box=None, pad_edge=False, show_header=False)
    facts.add_column(style="dim", no_wrap=True)
    for row in _facts(before, now):
        facts.add_row(*row)
    return Group(*rows, facts)


def _stages(known: router_pb2.Fleet) -> Table:
    table = Table("stage", "role", "at", box=None, pad_edge=False, header_style="dim")
    for name in ("run", "wait", "queued", "step"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("pool: used, cached", no_wrap=True)
    for stage in known.stages:
        info, load = stage.info, stage.load
        style = "" if stage.usable else "red"
        table.add_row(
            Text(info.instance_id or info.address, style=style, overflow="ellipsis", no_wrap=True),
            common_pb2.Role.Name(info.role).removeprefix("ROLE_").lower() if info.role else "?",
            info.site,
            f"{load.running}/{load.max_running}",
            str(load.waiting),
            str(load.queued_tokens),
            f"{load.step_ms:.0f} ms",
            _pool(load.blocks_total, load.blocks_free, load.blocks_cached),
        )
    return table


def _pool(total: int, free: int, cached: int) -> Text:
    """A bar of used (#), cached (=) and free blocks, with the shares in percent."""
    if not total:
        return Text("-")
    used = total - free - cached
    hashes = min(BAR, -(-used * BAR // total))
    equals = min(BAR - hashes, -(-cached * BAR // total))
    bar = f"{'#' * hashes}{'=' * equals}{'.' * (BAR - hashes - equals)}"
    return Text(f"{bar} {100 * used / total:.0f} %, {100 * cached / total:.0f} %")


def _unusable(known: router_pb2.Fleet) -> list[str]:
    return [
        f"{stage.info.instance_id or stage.info.address}: {stage.why_not}" for stage in known.stages if stage.why_not
    ]


def _links(before: Look, now: Look) -> Iterator[tuple[str, ...]]:
    """One row a link. Bytes are counted when a push ends, so `sent` comes in steps."""
    sent = _rates(before, now, "link_bytes")
    for stage in now.fleet.stages:
        for link in stage.load.links:
            rate = sent.get(link.peer, 0.0)
            use = f"{100 * rate / link.goodput_bytes_per_s:.0f} %" if link.goodput_bytes_per_s else "-"
            goodput = _bytes(link.goodput_bytes_per_s) + "/s" if link.goodput_bytes_per_s else "-"
            name = f"{stage.info.instance_id} → {link.peer}"
            yield name, f"{_bytes(rate)}/s", goodput, use, _bytes(link.pending_bytes)


def _facts(before: Look, now: Look) -> Iterator[tuple[str, str]]:
    prompt, hits = now.total("prompt_tokens"), now.labelled("hit_tokens")
    ahead = now.labelled("hit_gap_tokens")
    if prompt:
        at_p, at_md = (100 * hits.get(role, 0) / prompt for role in ("prefill", "main"))
        yield "prefix hits", f"P {at_p:.1f} %, MD {at_md:.1f} %, gap {at_p - at_md:+.1f} points"
        yield "only one had", f"P {ahead.get('prefill', 0):,.0f}, MD {ahead.get('main', 0):,.0f} tokens"
    rates = _rates(before, now, "output_tokens")
    all_tokens = now.labelled("output_tokens")
    yield "tokens", _listed({name: f"{count:,.0f} ({rates.get(name, 0):,.0f}/s)" for name, count in all_tokens.items()})
    pipelines: dict[str, int] = {}
    for name, count in now.fleet.requests.items():
        pipeline = name.partition("/")[0]
        pipelines[pipeline] = pipelines.get(pipeline, 0) + count
    yield "pipelines", _listed(pipelines)
    handoffs = now.total("handoffs")
    stalled = now.total("handoff_stall_seconds_count")
    stall = 1e3 * now.total("handoff_stall_seconds_sum") / stalled if stalled else 0.0
    yield "hand-offs", f"{handoffs:,.0f}, stall {stall:,.0f} ms mean" if handoffs else "none"
    yield "refused", _listed(now.labelled("refused"))
    yield "fallbacks", _listed(now.fleet.fallbacks)


def _rates(before: Look, now: Look, name: str) -> dict[str, float]:
    """By label, a second. A router that has restarted counts from 0 again: then nothing is shown once."""
    elapsed_s, old = now.at_s - before.at_s, before.labelled(name)
    if elapsed_s <= 0:
        return {}
    return {label: max(value - old.get(label, 0.0), 0.0) / elapsed_s for label, value in now.labelled(name).items()}


def _listed(counts: Mapping[str, object]) -> str:
    """ "p-md 3, md 1", the largest first; "none"."""
    ordered = sorted(counts.items(), key=lambda item: -item[1] if isinstance(item[1], int | float) else 0)
    shown = [f"{name} {count:,.0f}" if isinstance(count, float) else f"{name} {count}" for name, count in ordered]
    more = [f"{len(shown) - REASONS} more kinds"] if len(shown) > REASONS else []
    return ", ".join(shown[:REASONS] + more) or "none"


def _bytes(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"
