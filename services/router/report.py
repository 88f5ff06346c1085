"""What happened to one request: moments, gaps, hits, bytes. Told by the pipeline; asks nobody. Seconds inside."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvrelay.proto.v1 import router_pb2
from kvrelay.rpc.convert import handoff_mode_to_proto, pipeline_to_proto
from kvrelay.types import Pipeline, Role, Source
from services.router.answer import Answer
from services.router.fence import HandoffReport
from services.router.route import Route


@dataclass(slots=True)
class Record:
    """One request's record."""

    clock: Callable[[], float] = time.monotonic
    arrived: float = 0.0
    moments: list[tuple[str, float]] = field(default_factory=list)
    fallbacks: list[str] = field(default_factory=list)
    cached: dict[Role, int] = field(default_factory=dict)
    """As measured at each stage when its leg was opened first."""
    wan_bytes: dict[str, int] = field(default_factory=dict)
    """Transfer id -> bytes that have crossed a WAN."""
    ttft_s: float | None = None
    max_gap_s: float = 0.0
    stall_s: float | None = None
    _route: router_pb2.Route | None = None
    _last: float | None = None
    _last_source: Source | None = None

    def __post_init__(self) -> None:
        self.arrived = self.clock()

    @property
    def elapsed_s(self) -> float:
        """Since arrival."""
        return self.clock() - self.arrived

    def mark(self, name: str) -> None:
        """A moment for the timeline."""
        self.moments.append((name, self.clock() - self.arrived))

    def first(self, name: str) -> None:
        """As mark, once."""
        if all(name != known for known, _ in self.moments):
            self.mark(name)

    def measured(self, role: Role, cached_tokens: int) -> None:
        """A stage has looked its cache up."""
        self.cached.setdefault(role, cached_tokens)

    def tokens(self, source: Source) -> float | None:
        """Tokens were accepted; -> the gap before them in seconds, None for the first."""
        now = self.clock()
        gap = None if self._last is None else now - self._last
        if gap is None:
            self.ttft_s = now - self.arrived
            self.mark("first_token")
        else:
            self.max_gap_s = max(self.max_gap_s, gap)
        if self._last_source is Source.RELAY and source is Source.MAIN:
            self.stall_s = gap
        if source is not self._last_source and source is not Source.PREFILL:
            self.first(f"{source}_first_token")
        self._last, self._last_source = now, source
        return gap

    def usage(self, answer: Answer, prompt_tokens: int) -> router_pb2.Usage:
        """Counts that add up: prefill + relay + main = completion."""
        return router_pb2.Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=answer.count,
            prefill_tokens=answer.by_source[Source.PREFILL],
            relay_tokens=answer.by_source[Source.RELAY],
            main_tokens=answer.by_source[Source.MAIN],
            cached_prefill_tokens=self.cached.get(Role.PREFILL, 0),
            cached_relay_tokens=self.cached.get(Role.RELAY, 0),
            cached_main_tokens=self.cached.get(Role.MAIN, 0),
        )

    def route(self, planned: Route) -> router_pb2.Route:
        """The first route as clients see it; made once."""
        if self._route is None:
            self._route = route_to_proto(planned)
        return self._route

    def report(self, planned: Route, ended: Pipeline, reason: str, handoff: HandoffReport) -> router_pb2.RequestReport:
        """As the client gets it."""
        report = router_pb2.RequestReport(
            route=self.route(planned),
            pipeline=pipeline_to_proto(ended),
            reason=reason,
            max_gap_ms=1e3 * self.max_gap_s,
            ttft_ms=1e3 * (self.ttft_s or 0.0),
            wan_bytes=sum(self.wan_bytes.values()),
            handoff_mode=handoff_mode_to_proto(handoff.mode),
            handoff_rounds=handoff.rounds,
            handoff_ids=handoff.ids,
            relay_dropped=handoff.relay_dropped,
            fallbacks=self.fallbacks,
            timeline=[router_pb2.TimelineEvent(name=name, at_ms=1e3 * at) for name, at in self.moments],
        )
        if self.stall_s is not None:
            report.handoff_stall_ms = 1e3 * self.stall_s
        return report


def route_to_proto(route: Route) -> router_pb2.Route:
    """The route as clients see it."""
    return router_pb2.Route(
        pipeline=pipeline_to_proto(route.pipeline),
        reason=route.reason,
        prefill=route.prefill.instance_id if route.prefill else "",
        relay=route.relay.instance_id if route.relay else "",
        main=route.main.instance_id if route.main else "",
        hit_prefill_tokens=route.hit_prefill_tokens,
        hit_relay_tokens=route.hit_relay_tokens,
        hit_main_tokens=route.hit_main_tokens,
        crossing_bytes=route.crossing_bytes,
        crossing_ms=route.crossing_ms,
        ttft_ms=route.ttft_ms,
        handoff_mode=handoff_mode_to_proto(route.handoff_mode),
        index_degraded=route.index_degraded,
    )
