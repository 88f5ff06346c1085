"""The picture of a fleet: pure, 80 columns, whatever the fleet is like."""

import io

from rich.console import Console

from kvrelay.cli.top import Look, picture
from kvrelay.proto.v1 import common_pb2, router_pb2, stage_pb2


def drawn(now: Look, before: Look | None = None, said: str = "") -> list[str]:
    console = Console(file=io.StringIO(), width=80)
    console.print(picture("127.0.0.1:50050", before or now, now, said))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def stage(name: str, role: common_pb2.Role, **load: object) -> router_pb2.FleetStage:
    report = stage_pb2.LoadReport(max_running=16, blocks_total=1000, blocks_free=1000)
    report.MergeFrom(stage_pb2.LoadReport(**load))
    info = stage_pb2.StageInfo(instance_id=name, role=role, site="a")
    return router_pb2.FleetStage(info=info, load=report, usable=True)


def test_an_empty_fleet_is_drawn() -> None:
    assert "0 in flight" in drawn(Look(router_pb2.Fleet(policy="pdd")))[0]


def test_rates_hits_and_stalls_are_those_between_and_up_to_the_looks() -> None:
    link = stage_pb2.LinkReport(peer="main-1", goodput_bytes_per_s=4e6, pending_bytes=2_500_000)
    stages = [stage("prefill-1", common_pb2.ROLE_PREFILL, links=[link], blocks_cached=0)]
    counts = {"prompt_tokens": 1000, "hit_tokens/prefill": 600, "hit_tokens/main": 500, "hit_gap_tokens/prefill": 100}
    counts |= {"handoffs/one-shot": 2, "handoff_stall_seconds_count/one-shot": 2}
    counts |= {"handoff_stall_seconds_sum/one-shot": 0.1, "link_bytes/main-1": 3e6, "output_tokens/relay": 20}
    before = Look(router_pb2.Fleet(totals={"link_bytes/main-1": 1e6}), at_s=10.0)
    now = Look(router_pb2.Fleet(stages=stages, totals=counts, requests={"p-md/short": 3, "p-md/other": 1}), at_s=12.0)
    text = "\n".join(drawn(now, before))
    assert "P 60.0 %, MD 50.0 %, gap +10.0 points" in text
    assert "2, stall 50 ms mean" in text
    assert "1.0 MB/s  4.0 MB/s  25 %   2.5 MB" in text
    assert "relay 20 (10/s)" in text
    assert "p-md 4" in text


def test_a_router_that_restarted_shows_no_negative_rate() -> None:
    before = Look(router_pb2.Fleet(totals={"output_tokens/main": 900.0}), at_s=1.0)
    now = Look(router_pb2.Fleet(totals={"output_tokens/main": 5.0}), at_s=2.0)
    assert "main 5 (0/s)" in "\n".join(drawn(now, before))


def test_long_names_reasons_and_errors_stay_within_80_columns() -> None:
    name = "main-decode-of-the-second-building-0123456789"
    lost = stage(name, common_pb2.ROLE_MAIN, running=16, waiting=64, queued_tokens=123456, step_ms=1234.5)
    lost.usable, lost.why_not = False, "load reports stopped " * 6
    fallbacks = {f"a reason that is rather long {i}": i for i in range(12)}
    lines = drawn(Look(router_pb2.Fleet(stages=[lost], fallbacks=fallbacks)), said="UNAVAILABLE: gone " * 9)
    assert max(map(len, lines)) <= 80
    assert "6 more kinds" in " ".join(line.strip() for line in lines)
