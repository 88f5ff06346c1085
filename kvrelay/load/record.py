"""What one request left behind: flat facts, as its JSONL line has them. Knows no protos and computes no statistics."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from kvrelay.load.times import TokenTimes

SOURCES = {"p": "prefill", "r": "relay", "m": "main", "s": "server"}
"""By the letter that stands for it in `Record.sources`; "server": one that does not say which stage it was."""
LETTERS = {name: letter for letter, name in SOURCES.items()}


@dataclass(frozen=True, slots=True)
class Record(TokenTimes):
    """One request. Times in ms by the client's clock, since it was sent, unless said otherwise."""

    conversation: str
    turn: int
    """From 0."""
    outcome: str
    """ "ok", "failed", "cancelled" (by a hostile client), or "unfinished" (when the run's grace was over)."""
    request_id: str = ""
    error: str = ""
    failed_leg: str = ""
    """Of a failed request, if its error names one: "prefill", "relay", "main"."""
    manner: str = ""
    """Empty, or how its client misbehaved: "cancel", "slow", "probe"."""
    warm_up: bool = False
    """Due within the warm-up: not counted."""
    due_s: float = 0.0
    """Since the run began."""
    sent_s: float = 0.0
    queue_ms: float = 0.0
    """From when it was due to when it was sent: this client's own delay, in none of the other times."""
    prompt_tokens: int = 0
    wanted_tokens: int = 0
    """Its max_tokens."""
    output_tokens: int = 0
    finish: str = ""
    """Why the answer ended, as the server put it."""
    planned: str = ""
    """The pipeline as first planned."""
    pipeline: str = ""
    """As it ended."""
    reason: str = ""
    prefill: str = ""
    """Instances, as planned; empty: no such leg."""
    relay: str = ""
    main: str = ""
    cached_prefill_tokens: int = 0
    """Of the prompt, as measured at the stage."""
    cached_relay_tokens: int = 0
    cached_main_tokens: int = 0
    arrived_ms: tuple[float, ...] = ()
    """One per token."""
    sources: str = ""
    """One letter per token: p(refill), r(elay), m(ain), s(erver)."""
    e2el_ms: float = 0.0
    handoff_mode: str = ""
    handoff_rounds: int = 0
    handoff_ids: int = 0
    handoff_stall_ms: float | None = None
    """At the router."""
    router_max_gap_ms: float = 0.0
    router_ttft_ms: float = 0.0
    relay_dropped: int = 0
    wan_bytes: int = 0
    fallbacks: tuple[str, ...] = ()
    timeline: tuple[tuple[str, float], ...] = ()
    """The router's events, ms since it got the request."""
    matches: bool | None = None
    """Whether it equals the one-engine reference, up to near-ties; None: not compared."""
    first_difference: int | None = None
    """Output index where it differs from the reference; None: nowhere, or not compared."""
    margin: float | None = None
    """Of the reference's draw there."""
    seed: int = 0
    prompt_ids: tuple[int, ...] = field(default=(), repr=False)
    """Kept only if asked for."""
    ids: tuple[int, ...] = field(default=(), repr=False)

    @property
    def ok(self) -> bool:
        """Whether the answer is whole."""
        return self.outcome == "ok"

    @property
    def counted(self) -> bool:
        """Whether its times are this system's: whole, not of the warm-up, and read without pauses."""
        return self.ok and not self.warm_up and self.manner != "slow"

    @property
    def itl_by_source(self) -> dict[str, list[float]]:
        """The gaps before tokens of "relay", "main" and "server", and "handoff": from a relay's token to main's."""
        gaps: dict[str, list[float]] = {}
        for before, after, gap in zip(self.sources, self.sources[1:], self.itl_ms, strict=False):
            gaps.setdefault("handoff" if before + after == "rm" else SOURCES[after], []).append(gap)
        return gaps

    def tokens(self, source: str) -> int:
        """Output tokens by "prefill", "relay", "main" or "server"."""
        return self.sources.count(LETTERS[source])

    @property
    def hit_prefill(self) -> float:
        """Of the prompt, served from P's cache."""
        return self.cached_prefill_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def hit_main(self) -> float:
        """Of the prompt, served from MD's cache."""
        return self.cached_main_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def line(self) -> dict[str, Any]:
        """For JSONL: every field (ids only if they were kept), and the times and rates that follow from them."""
        fields = {name: value for name, value in asdict(self).items() if value or name not in ("prompt_ids", "ids")}
        derived = {name: getattr(self, name) for name in DERIVED}
        tokens = {f"tokens_{source}": self.tokens(source) for source in SOURCES.values()}
        return fields | derived | tokens | {f"itl_{name}_ms": gaps for name, gaps in self.itl_by_source.items()}

    @classmethod
    def of_line(cls, line: Mapping[str, Any]) -> "Record":
        """The record of such a line. KeyError or TypeError if it is none."""
        known = {name: line[name] for name in cls.__slots__ if name in line}
        lists = {name: tuple(value) for name, value in known.items() if isinstance(value, list)}
        lists["timeline"] = tuple((str(name), float(at_ms)) for name, at_ms in line.get("timeline", ()))
        return cls(**(known | lists))


DERIVED = ("ok", "ttft_ms", "ttst_ms", "tpot_ms", "itl_ms", "max_gap_ms", "hit_prefill", "hit_main")
