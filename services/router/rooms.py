"""What all requests share, wired by app.py. Holds no request."""

from dataclasses import dataclass, field

from kvrelay.kvcache.hashing import root_hash
from kvrelay.telemetry.metrics import RouterMetrics
from kvrelay.text.tokenizer import Tokenizer
from kvrelay.types import HandoffMode, StageDescription
from services.router.admission import Admission
from services.router.config import RouterSettings
from services.router.drain import DrainGroup
from services.router.fleet import Fleet
from services.router.input import Ask, Reader, Served
from services.router.legs import Legs
from services.router.performing import Patience
from services.router.policies import Policy
from services.router.prefixes import Prefixes
from services.router.route import Limits, Question


@dataclass(slots=True)
class Tally:
    """Numbers that GetFleet shows beside the metrics."""

    requests: dict[str, int]
    """By "pipeline/reason"."""
    fallbacks: dict[str, int]
    """By reason."""
    turn: int = 0
    """Counts requests: equal stages take turns."""


@dataclass(slots=True)
class Rooms:
    """One router's parts."""

    settings: RouterSettings
    tokenizer: Tokenizer
    fleet: Fleet
    prefixes: Prefixes
    policy: Policy
    limits: Limits
    reader: Reader
    admission: Admission
    drains: DrainGroup
    metrics: RouterMetrics
    tally: Tally
    patience: Patience
    open_legs: set[Legs] = field(default_factory=set)
    """Of every attempt that has not closed its streams."""
    _served: tuple[tuple[StageDescription, ...], Served] | None = None
    """Whose it is, and it."""

    def served(self) -> Served:
        """What the fleet serves now. Raises NoStage if no stage is registered."""
        example, live = self.fleet.example(), self.fleet.live()
        if self._served is None or self._served[0] is not live:
            served = Served(
                models=frozenset({self.settings.model, *(stage.model for stage in live)}),
                vocab_size=example.vocab_size,
                max_model_tokens=min(stage.max_model_tokens for stage in live),
                eos_token_ids=example.eos_token_ids,
                layout=example.layout,
                root=root_hash(example.layout),
            )
            self._served = live, served
        return self._served[1]

    async def question(self, ask: Ask) -> Question:
        """Looks the prompt up once; the planner's question about this moment. Raises NoStage."""
        hits = await self.prefixes.hits(ask.hashes, self.fleet.layout.block_tokens)
        if hits.degraded:
            self.metrics.degraded.inc()
        self.tally.turn += 1
        return Question(
            prompt_tokens=len(ask.prompt_ids),
            max_tokens=ask.sampling.max_tokens,
            stages=self.fleet.views(),
            hits=hits.tokens,
            degraded=hits.degraded,
            forced=ask.pipeline,
            handoff_mode=ask.handoff_mode or HandoffMode(self.settings.handoff_mode),
            turn=self.tally.turn,
            site=self.settings.site,
        )

    def fallback(self, reason: str) -> None:
        """Counts it where a person sees it."""
        self.metrics.fallbacks.labels(reason).inc()
        self.tally.fallbacks[reason] = self.tally.fallbacks.get(reason, 0) + 1
