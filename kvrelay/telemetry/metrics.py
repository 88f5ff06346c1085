"""What each kind of program counts. One object per app, each with a registry of its own; knows no service."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from kvrelay.telemetry.snapshot import Snapshots
from kvrelay.types import Pipeline, Role, Source, StageLoad

_TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3, 6, 12, 25, 60)
_GAP_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3, 6, 12)
_CALL_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
_IDS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_RATE_BYTES_PER_S = tuple(10.0**n * k for n in range(5, 11) for k in (1, 2.5, 5))


READ_COUNTERS = {
    "preemptions": "Sequences that lost their KV and were computed again",
    "transfer_resumes": "Lanes that were lost and opened again",
    "bulk_lanes": "Lanes whose frames went over a bulk connection",
    "grpc_lanes": "Lanes whose frames went over gRPC",
    "received_bytes": "KV payload bytes taken in",
    "late_frames": "Frames of ended transfers, refused",
    "crc_errors": "Frames whose checksum was wrong",
    "offers_parked": "Offers that had to wait for their decode stream or its KV room",
    "index_changes": "Cache changes announced to the prefix index",
    "index_announcements": "Times that the whole cache was announced anew",
}
"""What engine, transfer and index count of a stage by themselves, knowing no metrics."""


class Metrics:
    """A registry, the makers of its metrics, and `snapshots` for values that are read at the scrape."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.snapshots = Snapshots(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"kvrelay_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"kvrelay_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Iterable[float], *labels: str) -> Histogram:
        return Histogram(f"kvrelay_{name}", text, labels, buckets=tuple(buckets), registry=self.registry)

    def leftovers(self, read: Callable[[], Mapping[str, int]]) -> None:
        """Feed `kvrelay_leftovers{what}`: everything still held for requests, by kind; all zero when idle."""
        self.snapshots.gauges(
            "kvrelay_leftovers", "Held for requests now, by kind", ("what",), lambda: dict(read().items())
        )


@dataclass(slots=True)
class _TokenTally:
    """Counted for each token: with prometheus_client's own objects that costs as much as taking the token in."""

    tokens: int = 0
    gaps: list[int] = field(default_factory=lambda: [0] * (len(_GAP_S) + 1))
    """By upper bound, each only what is above the one before."""
    gaps_s: float = 0.0


class LinkMetrics(Metrics):
    """What pushes of KV cost, per receiver: counted by the prefill stage, and by the router from its reports."""

    def __init__(self) -> None:
        super().__init__()
        self.pushes = self._counter("pushes", "KV pushes that ended", "peer", "outcome")
        self.link_bytes = self._counter("link_bytes", "KV bytes sent, frames with headers", "peer")
        self.link_saved_bytes = self._counter("link_saved_bytes", "KV bytes that the receiver's cache saved", "peer")
        self.link_rate = self._histogram(
            "link_bytes_per_second", "Wire bytes of a push over its time", _RATE_BYTES_PER_S, "peer"
        )
        self._by_peer: dict[str, tuple[Counter, Counter, Histogram]] = {}
        self._by_outcome: dict[tuple[str, str], Counter] = {}

    def pushed(self, peer: str, outcome: str, *, wire_bytes: int, saved_bytes: int, seconds: float) -> None:
        """One push that ended: committed, ended (by the receiver) or failed."""
        if peer not in self._by_peer:
            of_peer = self.link_bytes.labels(peer), self.link_saved_bytes.labels(peer), self.link_rate.labels(peer)
            self._by_peer[peer] = of_peer
        if (peer, outcome) not in self._by_outcome:
            self._by_outcome[peer, outcome] = self.pushes.labels(peer, outcome)
        sent, saved, rate = self._by_peer[peer]
        self._by_outcome[peer, outcome].inc()
        sent.inc(wire_bytes)
        saved.inc(saved_bytes)
        if wire_bytes and seconds > 0:
            rate.observe(wire_bytes / seconds)


class RouterMetrics(LinkMetrics):
    """Of one router. Times are as seen at the router."""

    def __init__(self) -> None:
        super().__init__()
        counter, histogram = self._counter, self._histogram
        self.requests = counter("requests", "Requests by the pipeline they took, and why", "pipeline", "reason")
        self.outcomes = counter("outcomes", "Ended requests by finish reason or status code", "outcome")
        self.in_flight = self._gauge("requests_in_flight", "Requests whose stream is open")
        self.ttft = histogram("ttft_seconds", "Arrival to first token", _TTFT_S, "pipeline")
        self.e2e = histogram("request_seconds", "Arrival to the end of the stream", _TTFT_S, "pipeline")
        self.max_gap = histogram("max_gap_seconds", "A request's longest gap between tokens", _GAP_S)
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts")
        self._hits = counter("hit_tokens", "Prompt tokens served from the caches, as measured at the stages", "role")
        self._hit_gap = counter("hit_gap_tokens", "Prompt tokens that one of P and MD had and the other not", "ahead")

        self.handoffs = counter("handoffs", "Hand-offs from relay to main decode", "mode")
        self.handoff_stall = histogram("handoff_stall_seconds", "Last RLD token to first MD token", _GAP_S, "mode")
        self.handoff_ids = histogram("handoff_ids", "Ids in the last hand-off message", _IDS)
        self.relay_dropped = counter("relay_tokens_dropped", "RLD tokens at or beyond the fence")
        self.relay_skipped = counter("relay_skipped", "MD was ready before RLD had emitted")
        self.relay_paused = counter("relay_paused", "RLD used up its budget before the hand-off")

        self.fallbacks = counter("fallbacks", "Everything that did not go as planned, by reason", "reason")
        self.refused = counter("refused", "Requests refused because a bounded queue was full, by queue", "queue")
        self.singular = counter("singular", "Requests that end at RLD on purpose: by bound, or cut", "kind")
        self.singular_saved_bytes = counter("singular_saved_bytes", "KV bytes that did not cross for that reason")
        self.drains = counter("drains", "Answers that ended before MD had taken over, by outcome", "outcome")

        self._lookups = counter("index_lookups", "Look-ups in the prefix index, by outcome", "outcome")
        self._lookup_time = histogram("index_lookup_seconds", "Time of a look-up, whatever its outcome", _CALL_S)
        self.degraded = counter("index_degraded", "Requests planned from remembered or unknown hits")
        # A look-up of a label costs as much as counting; these are needed for each token and each request.
        self._tallies = {source: _TokenTally() for source in Source}
        self.snapshots.families("tokens", self._token_families)
        self._by_role = {role: self._hits.labels(role) for role in Role}
        self._by_pipeline = {name: (self.ttft.labels(name), self.e2e.labels(name)) for name in Pipeline}
        self._gap_of = {role: self._hit_gap.labels(role) for role in (Role.PREFILL, Role.MAIN)}

    def accepted(self, source: Source, tokens: int, gap_s: float | None) -> None:
        """Tokens came as one run, so long after the one before them (None: the first): they share that gap."""
        tally = self._tallies[source]
        tally.tokens += tokens
        if gap_s is not None:
            tally.gaps[bisect_left(_GAP_S, gap_s / tokens)] += tokens
            tally.gaps_s += gap_s

    def _token_families(self) -> list[Metric]:
        count = CounterMetricFamily(
            "kvrelay_output_tokens", "Tokens sent to clients, by who sampled them", labels=["source"]
        )
        gaps = HistogramMetricFamily(
            "kvrelay_itl_seconds", "Between two tokens, by who sampled the later one", labels=["source"]
        )
        for source, tally in self._tallies.items():
            count.add_metric([source], tally.tokens)
            bounds = [*map(floatToGoString, _GAP_S), "+Inf"]
            gaps.add_metric([source], [*zip(bounds, accumulate(tally.gaps), strict=True)], tally.gaps_s)
        return [count, gaps]

    def first_token(self, pipeline: Pipeline, seconds: float) -> None:
        """An answer has begun."""
        self._by_pipeline[pipeline][0].observe(seconds)

    def answered(self, pipeline: Pipeline, seconds: float) -> None:
        """An answer is complete; `pipeline` as it ended."""
        self._by_pipeline[pipeline][1].observe(seconds)

    def hits(self, *, prefill: int | None = None, relay: int | None = None, main: int | None = None) -> None:
        """One request's cached prompt tokens, as each stage measured them; None: that leg was not asked.

        The gap is counted if both P and MD were asked.
        """
        for role, tokens in ((Role.PREFILL, prefill), (Role.RELAY, relay), (Role.MAIN, main)):
            if tokens is not None:
                self._by_role[role].inc(tokens)
        if prefill is not None and main is not None and prefill != main:
            self._gap_of[Role.PREFILL if prefill > main else Role.MAIN].inc(abs(prefill - main))

    def fleet_from(self, read: Callable[[], Mapping[tuple[str, ...] | str, float]]) -> None:
        """Feed `kvrelay_fleet_stages{role, usable}`: stages known now; usable is yes or no."""
        self.snapshots.gauges("kvrelay_fleet_stages", "Stages by role and usability", ("role", "usable"), read)

    def index_lookup(self, outcome: str, seconds: float) -> None:
        """`observe` of RedisIndex: ok, timeout, error, or open (the breaker refused)."""
        self._lookups.labels(outcome).inc()
        self._lookup_time.observe(seconds)


class StageMetrics(LinkMetrics):
    """Of one stage, whatever its role."""

    def __init__(self) -> None:
        super().__init__()
        counter = self._counter
        self.legs = counter("legs", "Streams that held KV here, by how they ended", "end")
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts")
        self.hit_tokens = counter("hit_tokens", "Prompt tokens served from the cache")
        self.tokens = counter("output_tokens", "Tokens sampled here")
        self.extends = counter("extends", "Extend and Resume messages that brought ids")
        self.extend_tokens = counter("extend_tokens", "Ids that came with them")
        self.pauses = counter("pauses", "Sequences that used up their output budget")

        self.fallbacks = counter("fallbacks", "Everything that did not go as planned, by reason", "reason")

    def load_from(self, read: Callable[[], StageLoad]) -> None:
        """Ask `read` at each scrape for queue, pool, links, steps and paced overruns."""
        self.snapshots.families("load", lambda: _load_families(read()))

    def leases_from(self, read: Callable[[], Mapping[str, int]]) -> None:
        """Feed `kvrelay_leases{state}`: open streams that hold, or wait for, KV room here."""
        self.snapshots.gauges("kvrelay_leases", "Open streams by state", ("state",), lambda: dict(read().items()))

    def count_from(self, name: str, read: Callable[[], float]) -> None:
        """Feed a counter that a room below keeps as a plain number; KeyError unless it is one of `READ_COUNTERS`."""
        self.snapshots.counter(f"kvrelay_{name}", READ_COUNTERS[name], read)

    def describe(self, **labels: str) -> None:
        """Feed `kvrelay_stage_info`: instance_id, role, site, model and so on."""
        self.snapshots.gauges(
            "kvrelay_stage_info", "What this stage is", tuple(labels), lambda: {tuple(labels.values()): 1}
        )


def _load_families(load: StageLoad) -> list[Metric]:
    def gauge(name: str, text: str, value: float) -> Metric:
        return GaugeMetricFamily(f"kvrelay_{name}", text, value=value)

    def gauges(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        family = GaugeMetricFamily(f"kvrelay_{name}", text, labels=[label])
        for key, value in values.items():
            family.add_metric([key], value)
        return family

    used = load.blocks_total - load.blocks_free - load.blocks_cached
    blocks = {"free": load.blocks_free, "cached": load.blocks_cached, "used": used}
    return [
        gauge("running", "Sequences that are admitted and have not ended", load.running),
        gauge("waiting", "Sequences that wait for admission", load.waiting),
        gauge("max_running", "Sequences that may be admitted at once", load.max_running),
        gauges("pool_blocks", "KV blocks by state", "state", blocks),
        gauge("queued_tokens", "Tokens still to be computed by prefill and extend", load.queued_tokens),
        gauge("prefill_tokens_per_second", "Recent; 0: nothing measured", load.prefill_tokens_per_s),
        gauge("decode_step_seconds", "Recent mean decode step", load.step_ms / 1000),
        gauge("draining", "1: takes no new requests", load.draining),
        gauge("index_connected", "1: the prefix index hears of this stage's cache", load.index_connected),
        CounterMetricFamily("kvrelay_steps", "Engine steps", value=load.steps),
        CounterMetricFamily("kvrelay_steps_overrun", "Paced steps that took longer", value=load.steps_overrun),
        gauges(
            "link_goodput_bytes_per_second",
            "Measured goodput to a KV receiver",
            "peer",
            {link.peer: link.goodput_bytes_per_s for link in load.links},
        ),
        gauges(
            "link_pending_bytes",
            "Offered to a KV receiver and not acknowledged yet",
            "peer",
            {link.peer: link.pending_bytes for link in load.links},
        ),
    ]
