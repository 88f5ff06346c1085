"""A summary as tables for a terminal, and the same facts as lines for a page. Pure."""

from collections.abc import Mapping

from rich.console import Group
from rich.table import Table

from kvrelay.load.spread import Spread
from kvrelay.load.summary import Summary

NEAR_LIMIT = 0.7
"""Of one core: beyond this the generator's own delays may show in its times."""


def render(summary: Summary) -> Group:
    """Tables of times and facts."""
    times = Table("ms", *TIME_COLUMNS, title="at the client")
    for name, spread in summary.times_ms.items():
        times.add_row(name, *time_cells(spread))
    for column in times.columns[1:]:
        column.justify = "right"
    facts = Table(show_header=False, box=None)
    for name, value in fact_lines(summary):
        facts.add_row(name, value)
    return Group(times, facts)


TIME_COLUMNS = ("n", "mean", "std", "p50", "p90", "p99", "max")


def time_cells(spread: Spread) -> list[str]:
    """One per column."""
    values = (spread.mean, spread.std, spread.p50, spread.p90, spread.p99, spread.max)
    return [f"{spread.count:,}", *(f"{value:,.1f}" for value in values)]


def fact_lines(summary: Summary) -> list[tuple[str, str]]:
    """(name, value) of everything that is not a time; a list's later lines have no name."""
    lines = figure_lines(summary)
    for title, counts in counted(summary).items():
        lines += [(title if i == 0 else "", f"{n} × {name}") for i, (name, n) in enumerate(counts.items())]
    return lines + conditions(summary)


def figure_lines(summary: Summary) -> list[tuple[str, str]]:
    """(name, value) of what is neither a time nor a list."""
    lines = [("requests", _outcomes(summary)), ("throughput", _throughput(summary))]
    lines += _worth(summary)
    total = sum(summary.tokens.values()) or 1
    shares = ", ".join(f"{source} {count:,} ({count / total:.1%})" for source, count in summary.tokens.items())
    lines.append(("tokens by stage", shares))
    lines.append(("prompt hits", f"P {summary.hit_prefill:.1%}, MD {summary.hit_main:.1%}, gap {summary.hit_gap:+.1%}"))
    return lines + _link(summary)


def _outcomes(summary: Summary) -> str:
    parts = [f"{summary.requests}, whole {summary.ok}, failed {summary.failed}"]
    parts += [f"cancelled {summary.cancelled}"] if summary.cancelled else []
    parts += [f"unfinished {summary.unfinished}"] if summary.unfinished else []
    parts += [f"{summary.checked} compared, wrong {summary.wrong}"] if summary.checked else []
    return ", ".join(parts) + f", in {summary.wall_s:.1f} s"


def _throughput(summary: Summary) -> str:
    return (
        f"{summary.requests_per_s:.2f} requests/s, {summary.prompt_tokens_per_s:,.1f} prompt tokens/s, "
        f"{summary.output_tokens_per_s:,.1f} output tokens/s"
    )


def _worth(summary: Summary) -> list[tuple[str, str]]:
    lines = []
    if summary.goodput_per_s is not None:
        lines.append(("goodput", f"{summary.goodput_per_s:.2f} requests/s ({summary.good_share or 0:.1%} kept it)"))
    if summary.cost is not None:
        bcr = "give --goodput for the BCR" if summary.bcr is None else f"BCR {summary.bcr:.4f}"
        lines.append(("hardware cost", f"{summary.cost:g}, {bcr}"))
    return lines


def _link(summary: Summary) -> list[tuple[str, str]]:
    saved = "" if summary.saved_bytes is None else f", saved by MD's cache {summary.saved_bytes / 1e6:.1f} MB"
    use = "" if summary.link_use is None else f", link use {summary.link_use:.1%}"
    cut = f", {summary.cut_transfers} transfers cut" if summary.cut_transfers else ""
    return [("KV over the WAN", f"{summary.wan_bytes / 1e6:.1f} MB{saved}{use}{cut}")]


def counted(summary: Summary) -> Mapping[str, Mapping[str, int]]:
    """How often what happened, by kind."""
    return {
        "pipelines": summary.reasons,
        "fallbacks": summary.fallbacks,
        "hostile clients": summary.manners,
        "failures by leg": summary.failed_legs,
        "errors": summary.errors,
    }


def conditions(summary: Summary) -> list[tuple[str, str]]:
    """(name, value) of what may have bent the times."""
    near = ": NEAR ITS LIMIT, its own delays may be in these times; use --processes"
    own = f"{summary.cpu_share:.0%} of a core{near if summary.cpu_share >= NEAR_LIMIT else ''}"
    lines = [("the generator used", own)] if summary.cpu_share else []
    if summary.pace:
        overran = f"{summary.steps_overrun:,} of {summary.steps:,} steps overran"
        lines.append(("paced engines", f"{summary.pace} (emulated accelerators); {overran}"))
    return lines
