"""`kvrelay plan`: the route that a prompt would get now, and why. Starts nothing."""

from typing import Annotated

import typer
from rich.table import Table

from kvrelay.cli import options as o
from kvrelay.cli.console import out, run
from kvrelay.load.client import HANDOFF_MODES, PIPELINES
from kvrelay.proto.v1 import router_pb2, router_pb2_grpc
from kvrelay.rpc.channels import open_channel


def plan(
    prompt: Annotated[str, typer.Argument(help="Text.")],
    chat: Annotated[bool, typer.Option("--chat", help="PROMPT is a user's message.")] = False,
    ids: Annotated[bool, typer.Option("--ids", help="PROMPT is token ids: 1,2,3.")] = False,
    router: o.Router = o.DEFAULT_ROUTER,
    max_tokens: o.MaxTokens = 128,
    pipeline: o.Forced = None,
    handoff_mode: o.Handoff = None,
    cache_salt: o.Salt = "",
) -> None:
    """Show the route that PROMPT would get now, and why no other."""
    request = router_pb2.GenerateRequest(sampling=o.sampling(max_tokens=max_tokens), cache_salt=cache_salt)
    o.forced(request, pipeline, handoff_mode)
    o.Input(prompt, o.Form.CHAT if chat else o.Form.IDS if ids else o.Form.TEXT).put(request)
    run(_plan(router, request))


async def _plan(address: str, request: router_pb2.GenerateRequest) -> int:
    async with open_channel(address) as channel:
        reply = await router_pb2_grpc.RouterServiceStub(channel).Plan(request, timeout=10.0)
    route = reply.route
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim")
    table.add_row("pipeline", f"[bold]{PIPELINES.get(route.pipeline, '?')}[/bold]: {route.reason}")
    table.add_row("stages", " → ".join(stage for stage in (route.prefill, route.relay, route.main) if stage))
    table.add_row("hits, tokens", f"P {route.hit_prefill_tokens}, MD {route.hit_main_tokens}")
    table.add_row("crossing", f"{route.crossing_bytes / 1e6:.2f} MB in {route.crossing_ms:.0f} ms")
    table.add_row("expected TTFT", f"{route.ttft_ms:.0f} ms")
    table.add_row("hand-off", HANDOFF_MODES.get(route.handoff_mode, "none"))
    table.add_row("index", "degraded: hits are remembered or unknown" if route.index_degraded else "answered")
    for number, other in enumerate(reply.considered):
        table.add_row("" if number else "not taken", other)
    out.print(table)
    return 0
