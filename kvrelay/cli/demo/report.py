"""The demo's table and demo-report.json, from asked requests and verdicts. Pure: writes no file, asks nobody."""

from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from kvrelay.cli.demo.asking import Asked
from kvrelay.cli.demo.verdict import Verdict
from kvrelay.load.client import HANDOFF_MODES, PIPELINES
from kvrelay.proto.v1 import router_pb2

PIPELINE_COLOURS = {"p-rld-md": "#f58518", "p-md": "#4c78a8", "md": "#54a24b", "p-rld": "red"}


def row_of(asked: Asked, verdict: Verdict) -> dict[str, Any]:
    """One request as demo-report.json has it; `margin` only where a near-tie flipped."""
    completed = asked.answer.completed or router_pb2.Completed()
    report, usage, prompt_tokens = completed.report, completed.usage, len(asked.prompt_ids)
    row = {
        "pipeline": PIPELINES.get(report.pipeline, ""),
        "reason": asked.answer.error or report.reason,
        "hit_prefill": round(usage.cached_prefill_tokens / prompt_tokens, 4),
        "hit_main": round(usage.cached_main_tokens / prompt_tokens, 4),
        "prompt_tokens": prompt_tokens,
        "ttft_ms": _rounded(asked.answer.ttft_ms),
        "tokens_relay": usage.relay_tokens,
        "tokens_main": usage.main_tokens,
        "handoff_mode": HANDOFF_MODES.get(report.handoff_mode),
        "handoff_stall_ms": _rounded(report.handoff_stall_ms) if report.HasField("handoff_stall_ms") else None,
        "max_gap_ms": _rounded(report.max_gap_ms),
        "wan_bytes": report.wan_bytes,
        "matches_reference": asked.answer.ok and verdict.matches,
    }
    return row if verdict.margin is None else row | {"margin": verdict.margin}


def _rounded(ms: float | None) -> float | None:
    return None if ms is None else round(ms, 1)


def table_of(asked: Sequence[Asked], rows: Sequence[dict[str, Any]]) -> Table:
    """One line a request."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("\nchat", "\npipeline", "\nwhy"):
        table.add_column(name, overflow="fold")
    for name in ("prompt\ntokens", "hit\nP", "hit\nMD", "TTFT\nms", "by\nRLD", "by\nMD"):
        table.add_column(name, justify="right")
    table.add_column("\nhand-off")
    for name in ("stall\nms", "WAN\nMB", "equals\nreference"):
        table.add_column(name, justify="right")
    for one, row in zip(asked, rows, strict=True):
        table.add_row(
            f"{one.chat} {one.turn}",
            Text(row["pipeline"] or "failed", style=PIPELINE_COLOURS.get(row["pipeline"], "red")),
            row["reason"],
            f"{row['prompt_tokens']}",
            f"{row['hit_prefill']:.0%}",
            f"{row['hit_main']:.0%}",
            _number(row["ttft_ms"]),
            f"{row['tokens_relay']}",
            f"{row['tokens_main']}",
            row["handoff_mode"] or "–",
            _number(row["handoff_stall_ms"]),
            f"{row['wan_bytes'] / 1e6:.1f}",
            _equal(row),
        )
    return table


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def _equal(row: dict[str, Any]) -> Text:
    if not row["matches_reference"]:
        return Text("NO", style="bold red")
    return Text(f"near-tie {row['margin']:.0e}", style="yellow") if "margin" in row else Text("yes", style="green")
