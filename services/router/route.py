"""What the planner is told and what it answers: frozen values. Knows no gRPC and no rule."""

from dataclasses import dataclass, field

from kvrelay.types import HandoffMode, Pipeline, StageDescription, StageLoad


@dataclass(frozen=True, slots=True)
class StageView:
    """One stage as the fleet sees it at this moment."""

    description: StageDescription
    load: StageLoad | None = None
    """None: it has not reported yet. That is not idleness."""
    load_at: float = 0.0
    """When that report came, on the router's monotonic clock."""
    sent_requests: int = 0
    """Requests sent there since that report."""
    sent_tokens: int = 0
    """Their prompt tokens that the stage's cache lacked."""
    sent_crossings: tuple[tuple[str, int], ...] = ()
    """(receiver, bytes) of pushes asked for so recently that its report may not know them."""
    why_not: str = ""
    """Why it must not be chosen; empty: usable."""
    joins: int = 0
    """Times that this router has reached it."""
    busy: int = field(init=False)
    """Sequences there, one that waits counted four times; of a stage that has not reported, half of its slots."""

    def __post_init__(self) -> None:
        load = self.load
        here = max(1, self.description.max_running // 2) if load is None else load.running + 4 * load.waiting
        object.__setattr__(self, "busy", here + self.sent_requests)

    @property
    def instance_id(self) -> str:
        return self.description.instance_id

    @property
    def incarnation(self) -> tuple[str, int]:
        """This process of the instance."""
        return self.description.instance_id, self.description.epoch


@dataclass(frozen=True, slots=True)
class Limits:
    """The planner's thresholds; see RouterSettings for each."""

    stall_ms: float = 200.0
    local_extend_tokens: int = 64
    singular_margin: float = 2.0
    relay_budget: int = 256
    wan_rate_bytes_per_s: float = 125e6
    wan_delay_ms: float = 10.0
    lan_rate_bytes_per_s: float = 1e9
    lan_delay_ms: float = 0.5
    prefill_tokens_per_s: float = 2000.0
    itl_ms: float = 30.0
    load_penalty_tokens: int = 64


@dataclass(frozen=True, slots=True)
class Question:
    """One request, all stages, what their caches hold of it."""

    prompt_tokens: int
    max_tokens: int
    stages: tuple[StageView, ...]
    """In order of instance id: equal stages take turns in it."""
    hits: dict[str, int] = field(default_factory=dict)
    """Instance id -> cached prompt tokens."""
    degraded: bool = False
    """The prefix index did not answer: hits are remembered or unknown."""
    forced: Pipeline | None = None
    handoff_mode: HandoffMode = HandoffMode.DYNAMIC
    excluded: frozenset[tuple[str, int]] = frozenset()
    """(instance id, epoch) of those that have failed this request."""
    turn: int = 0
    """Counts requests: equal stages take turns."""
    site: str = "a"
    """Of the router."""


@dataclass(frozen=True, slots=True)
class Route:
    """The frozen decision. A leg that is None does not exist."""

    pipeline: Pipeline
    reason: str
    prefill: StageView | None
    relay: StageView | None
    main: StageView | None
    hit_prefill_tokens: int = 0
    hit_relay_tokens: int = 0
    hit_main_tokens: int = 0
    crossing_bytes: int = 0
    crossing_ms: float = 0.0
    avoided_bytes: int = 0
    """p-rld: what would have crossed to the main stage that was not chosen."""
    ttft_ms: float = 0.0
    handoff_mode: HandoffMode = HandoffMode.DYNAMIC
    index_degraded: bool = False
    hold_first: bool = False
    """The first token waits until the decode stage has the KV (the baselines' way)."""
    considered: tuple[str, ...] = ()
    """Why other choices were not taken."""
