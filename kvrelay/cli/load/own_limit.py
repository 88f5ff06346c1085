"""`kvrelay load --self-test`: the generator's own limit, as a table."""

from rich.table import Table

from kvrelay.cli.console import out
from kvrelay.load.own_limit import OwnLimit, null_router, own_limit

SHAPES = (1, 64, 512)
DURATION_S = 3.0


async def show_own_limit(duration_s: float = DURATION_S) -> int:
    """Measures with short and long answers; -> the exit code."""
    async with null_router() as address:
        await own_limit(address, 1, 0.3)
        limits = [await own_limit(address, tokens, duration_s) for tokens in SHAPES]
    out.print(limit_table(limits))
    out.print("One process, one token a message, prompts of 512 ids; the null router is another process.")
    out.print("On a whole core: what was driven ÷ the share of a core that it took.")
    return 0


def limit_table(limits: list[OwnLimit]) -> Table:
    """A line a shape."""
    table = Table(
        "tokens an answer", "requests/s", "tokens/s", "of a core", "requests/s a core", "tokens/s a core",
        title="what this load generator can drive",
    )  # fmt: skip
    for one in limits:
        driven = (f"{one.requests_per_s:,.0f}", f"{one.tokens_per_s:,.0f}", f"{one.cpu_share:.0%}")
        table.add_row(
            str(one.output_tokens), *driven, f"{one.requests_per_core_s:,.0f}", f"{one.tokens_per_core_s:,.0f}"
        )
    for column in table.columns:
        column.justify = "right"
    return table
