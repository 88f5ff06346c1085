"""The `kvrelay` program: its commands, one file each. Imports no torch: a command that needs it does so itself."""

import typer

from kvrelay.cli import fleet, generate, health, plan, redis, top, up, wan, wan_set
from kvrelay.cli.demo import command
from kvrelay.cli.load.command import load

app = typer.Typer(
    help="LLM inference over two datacenters: prefill, relay decode, main decode.",
    epilog="Start: kvrelay up. Then, elsewhere: kvrelay generate --chat Hello; kvrelay top.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("up", short_help="Run two datacenters on this host; the WAN is emulated.")(up.up)
app.command("generate", short_help="Stream an answer, then say how it was made.")(generate.generate)
app.command("plan", short_help="Show the route a prompt would get now, and why.")(plan.plan)
app.command("fleet", short_help="Show the router's stages, load, requests, fallbacks.")(fleet.fleet)
app.command("top", short_help="Watch a router's fleet live.")(top.top)
app.command("load", short_help="Measure a router under load.")(load)
app.command("demo", short_help="A model over all three kinds of stage, checked.")(command.demo)
app.command(
    "wan",
    short_help="Run the WAN emulator: kvrelay wan -- --help.",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)(wan.wan)
app.command("wan-set", short_help="Change or show a running WAN emulator.")(wan_set.wan_set)
app.command("redis", short_help="Run a Redis for the prefix index.")(redis.redis_)
app.command("health", short_help="Ask a server whether it is ready.")(health.health)
