"""`kvrelay wan-set`: changes the emulated WAN while it runs, and shows its state."""

import enum
from typing import Annotated

import typer
from rich.table import Table

from kvrelay.cli.console import out, run
from kvrelay.proto.v1 import wan_pb2, wan_pb2_grpc
from kvrelay.rpc.channels import open_channel
from kvrelay.wan.settings import parse_rate


class Towards(enum.StrEnum):
    """Which way the bytes go."""

    BOTH = "both"
    A = "a"
    B = "b"


class Broken(enum.StrEnum):
    """How the link is out of order; see wan.proto."""

    NONE = "none"
    REFUSE = "refuse"
    STALL = "stall"
    RESET = "reset"


Ms = Annotated[float | None, typer.Option(min=0)]


def wan_set(
    admin: Annotated[str, typer.Argument(help="host:port of the emulator's admin service, as `kvrelay up` shows it.")],
    rate: Annotated[str | None, typer.Option(help="Of the link: 100mbit, 12.5MB, 0 = unlimited.")] = None,
    connection_rate: Annotated[str | None, typer.Option(help="Of each connection; 0 = no cap.")] = None,
    delay_ms: Ms = None,
    jitter_ms: Ms = None,
    towards: Annotated[Towards, typer.Option(help="The direction: bytes towards site b, a, or both.")] = Towards.BOTH,
    outage: Annotated[Broken | None, typer.Option(help="Break the link, or mend it (none).")] = None,
) -> None:
    """Change rate, delay, jitter or outage of a running WAN emulator; with no flag just show its state."""
    direction = wan_pb2.Direction(delay_ms=delay_ms, jitter_ms=jitter_ms)
    try:
        if rate is not None:
            direction.rate_bytes_per_s = parse_rate(rate)
        if connection_rate is not None:
            direction.connection_rate_bytes_per_s = parse_rate(connection_rate)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    request = wan_pb2.SetLinkRequest()
    if towards is not Towards.A:
        request.a_to_b.CopyFrom(direction)
    if towards is not Towards.B:
        request.b_to_a.CopyFrom(direction)
    if outage is not None:
        request.outage = wan_pb2.Outage.Value(f"OUTAGE_{outage.name}")
    run(_wan_set(admin, request))


async def _wan_set(admin: str, request: wan_pb2.SetLinkRequest) -> int:
    async with open_channel(admin) as channel:
        state = await wan_pb2_grpc.WanServiceStub(channel).SetLink(request, timeout=10.0)
    out.print(link_table(state))
    out.print(f"outage {wan_pb2.Outage.Name(state.outage).removeprefix('OUTAGE_').lower()}, "
              f"{state.connections} connections, CPU {state.cpu_s:.1f} s of {state.up_s:.0f} s")  # fmt: skip
    for target, address in state.mappings.items():
        out.print(f"{address} leads to {target}", markup=False)
    return 0


def link_table(state: wan_pb2.LinkState) -> Table:
    """One row a direction."""
    table = Table("direction", "rate", "delay", "jitter", "per connection", "carried", "backlog")
    directions = (("a → b", state.a_to_b, state.a_to_b_stats), ("b → a", state.b_to_a, state.b_to_a_stats))
    for name, direction, stats in directions:
        table.add_row(
            name,
            _rate(direction.rate_bytes_per_s, "unlimited"),
            f"{direction.delay_ms:g} ms",
            f"{direction.jitter_ms:g} ms",
            _rate(direction.connection_rate_bytes_per_s, "no cap"),
            f"{stats.bytes / 1e6:.1f} MB",
            f"{stats.backlog_bytes / 1e3:.0f} KB",
        )
    return table


def _rate(bytes_per_s: float, none: str) -> str:
    return f"{bytes_per_s * 8 / 1e6:,.1f} Mbit/s" if bytes_per_s else none
