"""The demo's report has exactly the fields that were promised, and its picture shows what happened."""

import io
from pathlib import Path

from rich.console import Console

from kvrelay.cli.demo import timeline
from kvrelay.cli.demo.asking import Asked
from kvrelay.cli.demo.report import row_of, table_of
from kvrelay.cli.demo.verdict import Verdict
from kvrelay.load.client import Answer
from kvrelay.proto.v1 import router_pb2
from kvrelay.types import Sampling

FIELDS = {
    "pipeline", "reason", "hit_prefill", "hit_main", "prompt_tokens", "ttft_ms", "tokens_relay", "tokens_main",
    "handoff_mode", "handoff_stall_ms", "max_gap_ms", "wan_bytes", "matches_reference",
}  # fmt: skip


def relayed() -> Asked:
    report = router_pb2.RequestReport(
        pipeline=router_pb2.PIPELINE_P_RLD_MD,
        reason="KV is late",
        handoff_stall_ms=12.34,
        max_gap_ms=20.0,
        wan_bytes=5_000_000,
        handoff_mode=router_pb2.HANDOFF_MODE_ONE_SHOT,
        timeline=[
            router_pb2.TimelineEvent(name="prefill_started", at_ms=3.0),
            router_pb2.TimelineEvent(name="relay_ready", at_ms=120.0),
            router_pb2.TimelineEvent(name="main_ready", at_ms=180.0),
        ],
    )
    usage = router_pb2.Usage(
        prompt_tokens=10, completion_tokens=5, prefill_tokens=1, relay_tokens=2, main_tokens=2, cached_prefill_tokens=5
    )
    answer = Answer(
        sent_at_s=0.0,
        completed=router_pb2.Completed(usage=usage, report=report),
        ids=[1, 2, 3, 4, 5],
        sources=["prefill", "relay", "relay", "main", "main"],
        arrived_ms=[100.0, 130.0, 160.0, 200.0, 230.0],
    )
    return Asked("chat", 1, tuple(range(10)), Sampling(seed=0, max_tokens=5), answer)


def failed() -> Asked:
    return Asked(
        "chat", 2, (1, 2), Sampling(seed=0, max_tokens=5), Answer(sent_at_s=0.0, error="UNAVAILABLE: no stage")
    )


def test_a_request_has_exactly_the_promised_fields() -> None:
    row = row_of(relayed(), Verdict(True))
    assert set(row) == FIELDS
    assert row["pipeline"] == "p-rld-md"
    assert row["hit_prefill"] == 0.5
    assert (row["tokens_relay"], row["tokens_main"]) == (2, 2)
    assert (row["handoff_mode"], row["handoff_stall_ms"]) == ("one-shot", 12.3)
    assert row["matches_reference"] is True


def test_a_flipped_near_tie_shows_its_margin() -> None:
    assert row_of(relayed(), Verdict(True, 5e-4, 3))["margin"] == 5e-4


def test_a_failed_request_never_matches_and_says_why() -> None:
    row = row_of(failed(), Verdict(True))
    assert row["matches_reference"] is False
    assert row["reason"] == "UNAVAILABLE: no stage"
    assert row["handoff_mode"] is None and row["handoff_stall_ms"] is None and row["ttft_ms"] is None


def test_the_table_has_a_line_per_request() -> None:
    asked = [relayed(), failed()]
    rows = [row_of(one, Verdict(one.answer.ok)) for one in asked]
    console = Console(width=200, file=io.StringIO())
    console.print(table_of(asked, rows))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "chat 1" in shown and "p-rld-md" in shown and "yes" in shown
    assert "chat 2" in shown and "NO" in shown


def test_the_timeline_goes_from_prefill_over_the_hand_off_to_main_decode(tmp_path: Path) -> None:
    bars = timeline.bars_of(relayed().answer)
    assert [bar.kind for bar in bars] == ["P", "KV", "KV", "RLD", "hand-off", "MD"]
    hand_off = bars[4]
    assert (hand_off.start_ms, hand_off.end_ms) == (160.0, 200.0)
    picture = tmp_path / "timeline.png"
    timeline.save(bars, "a request", picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    Console(quiet=True).print(timeline.draw(bars, "a request"))
