"""Metrics of several apps in one process, values read at the scrape, and the HTTP endpoint."""

import asyncio
import logging

import pytest
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.parser import text_string_to_metric_families

from kvrelay.telemetry.metrics import _GAP_S, Metrics, RouterMetrics, StageMetrics
from kvrelay.telemetry.serve import serve_metrics
from kvrelay.types import LinkLoad, Source, StageLoad


async def http(address: str, request: bytes) -> tuple[bytes, bytes]:
    """(status line, body)."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.split(b"\r\n")[0], body


async def scrape(address: str) -> dict[tuple[str, tuple[str, ...]], float]:
    """Value by (sample name, label values)."""
    status, body = await http(address, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    assert status == b"HTTP/1.1 200 OK"
    return {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


async def test_several_apps_in_one_process_count_apart() -> None:
    one, two = RouterMetrics(), RouterMetrics()
    StageMetrics()
    one.requests.labels("p-md", "hit").inc()
    assert one.registry.get_sample_value("kvrelay_requests_total", {"pipeline": "p-md", "reason": "hit"}) == 1
    assert two.registry.get_sample_value("kvrelay_requests_total", {"pipeline": "p-md", "reason": "hit"}) is None


@pytest.mark.parametrize("metrics", [RouterMetrics(), StageMetrics()], ids=lambda m: type(m).__name__)
def test_every_name_begins_with_kvrelay(metrics: Metrics) -> None:
    families = list(metrics.registry.collect())
    assert families
    assert all(family.name.startswith("kvrelay_") for family in families)


def test_hits_count_per_stage_and_their_gap_by_who_is_ahead() -> None:
    metrics = RouterMetrics()
    metrics.hits(prefill=160, main=64)
    metrics.hits(prefill=0, main=32)
    metrics.hits(main=16)
    metrics.hits(prefill=48, relay=0)

    def value(name: str, label: str, role: str) -> float | None:
        return metrics.registry.get_sample_value(f"kvrelay_{name}_total", {label: role})

    assert value("hit_tokens", "role", "prefill") == 208
    assert value("hit_tokens", "role", "main") == 112
    assert value("hit_gap_tokens", "ahead", "prefill") == 96
    assert value("hit_gap_tokens", "ahead", "main") == 32


def test_a_push_counts_bytes_sent_and_saved_and_its_rate() -> None:
    metrics = StageMetrics()
    metrics.pushed("m1", "committed", wire_bytes=1000, saved_bytes=9000, seconds=0.5)
    metrics.pushed("m1", "ended", wire_bytes=0, saved_bytes=0, seconds=0.0)
    value = metrics.registry.get_sample_value
    assert value("kvrelay_link_bytes_total", {"peer": "m1"}) == 1000
    assert value("kvrelay_link_saved_bytes_total", {"peer": "m1"}) == 9000
    assert value("kvrelay_link_bytes_per_second_sum", {"peer": "m1"}) == 2000
    assert value("kvrelay_pushes_total", {"peer": "m1", "outcome": "ended"}) == 1


async def test_load_leftovers_and_description_are_read_at_each_scrape() -> None:
    metrics = StageMetrics()
    loads = iter([StageLoad(), StageLoad(running=3, blocks_total=10, blocks_free=4, blocks_cached=1, steps_overrun=7)])
    metrics.load_from(lambda: next(loads))
    held = {"transfers": 0}
    metrics.leftovers(lambda: held)
    metrics.describe(instance_id="m1", role="main")
    async with serve_metrics(metrics.registry, "127.0.0.1:0") as address:
        assert (await scrape(address))["kvrelay_running", ()] == 0
        held["transfers"] = 2
        samples = await scrape(address)
    assert samples["kvrelay_running", ()] == 3
    assert samples["kvrelay_pool_blocks", ("used",)] == 5
    assert samples["kvrelay_steps_overrun_total", ()] == 7
    assert samples["kvrelay_leftovers", ("transfers",)] == 2
    assert samples["kvrelay_stage_info", ("m1", "main")] == 1


def test_links_are_gauges_per_peer() -> None:
    metrics = StageMetrics()
    metrics.load_from(lambda: StageLoad(links=(LinkLoad("m1", 5e6, 123), LinkLoad("m2", 0, 0))))
    value = metrics.registry.get_sample_value
    assert value("kvrelay_link_goodput_bytes_per_second", {"peer": "m1"}) == 5e6
    assert value("kvrelay_link_pending_bytes", {"peer": "m1"}) == 123


def test_a_callback_that_raises_costs_only_its_own_metric(caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics()
    metrics.snapshots.gauge("kvrelay_bad", "raises", lambda: 1 / 0)
    metrics.snapshots.counter("kvrelay_good", "works", lambda: 5)
    assert metrics.registry.get_sample_value("kvrelay_good_total") == 5
    assert any(r.levelno == logging.ERROR and "kvrelay_bad" in r.getMessage() for r in caplog.records)
    with pytest.raises(ValueError, match="kvrelay_bad is there already"):
        metrics.snapshots.gauge("kvrelay_bad", "again", lambda: 1)


def test_what_other_rooms_count_is_read_under_known_names_only() -> None:
    metrics = StageMetrics()
    metrics.count_from("preemptions", lambda: 3)
    metrics.leases_from(lambda: {"loading": 2})
    assert metrics.registry.get_sample_value("kvrelay_preemptions_total") == 3
    assert metrics.registry.get_sample_value("kvrelay_leases", {"state": "loading"}) == 2
    with pytest.raises(KeyError):
        metrics.count_from("nonsense", lambda: 0)


def test_the_router_shows_its_fleet() -> None:
    metrics = RouterMetrics()
    metrics.fleet_from(lambda: {("main", "yes"): 2, ("main", "no"): 1})
    metrics.index_lookup("timeout", 0.02)
    value = metrics.registry.get_sample_value
    assert value("kvrelay_fleet_stages", {"role": "main", "usable": "no"}) == 1
    assert value("kvrelay_index_lookups_total", {"outcome": "timeout"}) == 1


async def test_the_endpoint_answers_other_requests_clearly() -> None:
    async with serve_metrics(Metrics().registry, "127.0.0.1:0") as address:
        assert (await http(address, b"GET /other HTTP/1.1\r\n\r\n"))[0] == b"HTTP/1.1 404 Not Found"
        assert (await http(address, b"POST /metrics HTTP/1.1\r\n\r\n"))[0] == b"HTTP/1.1 405 Method Not Allowed"
        assert await http(address, b"x" * 100_000 + b"\r\n\r\n") == (b"", b"")
        assert await scrape(address) == {}


async def test_an_idle_connection_does_not_hold_up_the_end() -> None:
    async with asyncio.timeout(2):
        async with serve_metrics(Metrics().registry, "127.0.0.1:0") as address:
            host, _, port = address.rpartition(":")
            _, writer = await asyncio.open_connection(host, int(port))
            await scrape(address)
        writer.close()
        await writer.wait_closed()


async def test_no_listen_address_serves_nothing_and_a_taken_one_is_named() -> None:
    async with serve_metrics(Metrics().registry, "") as address:
        assert address == ""
    async with serve_metrics(Metrics().registry, "127.0.0.1:0") as address:
        with pytest.raises(OSError, match=f"cannot serve metrics on {address}"):
            async with serve_metrics(Metrics().registry, address):
                pass
    with pytest.raises(ValueError, match="metrics_listen: must be host:port"):
        async with serve_metrics(Metrics().registry, "nowhere"):
            pass


def test_gaps_between_tokens_are_counted_as_a_histogram_does() -> None:
    ours, gaps = RouterMetrics(), [0.0005, 0.001, 0.0011, 0.5, 99.0]
    theirs = Histogram("itl", "as prometheus_client counts", buckets=_GAP_S, registry=CollectorRegistry())
    for gap in gaps:
        ours.accepted(Source.MAIN, 2, 2 * gap)
        theirs.observe(gap)
        theirs.observe(gap)
    ours.accepted(Source.PREFILL, 1, None)
    read = ours.registry.get_sample_value
    for sample in next(iter(theirs.collect())).samples:
        if not sample.name.endswith("_created"):
            name = sample.name.replace("itl", "kvrelay_itl_seconds")
            assert read(name, {"source": "main", **sample.labels}) == pytest.approx(sample.value)
    assert read("kvrelay_itl_seconds_count", {"source": "prefill"}) == 0
    assert read("kvrelay_output_tokens_total", {"source": "main"}) == 2 * len(gaps)
    assert read("kvrelay_output_tokens_total", {"source": "prefill"}) == 1
