"""The `kvrelay` program: its commands, one file each. Imports no torch: a command that needs it does so itself."""

import typer

from kvrelay.cli import fleet, generate, health, load, plan, redis, up, wan, wan_set
from kvrelay.cli.demo import command

app = typer.Typer(
    help="LLM inference over two datacenters: prefill, relay decode, main decode.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("up")(up.up)
app.command("generate")(generate.generate)
app.command("plan")(plan.plan)
app.command("fleet")(fleet.fleet)
app.command("load")(load.load)
app.command("demo")(command.demo)
app.command("wan", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(wan.wan)
app.command("wan-set")(wan_set.wan_set)
app.command("redis")(redis.redis_)
app.command("health")(health.health)
