"""From flags to whom is asked: a router, or any OpenAI-compatible server. Knows what a fleet says of its vocabulary."""

from dataclasses import dataclass

from kvrelay.load.http import Url
from kvrelay.load.openai import OpenAiTarget
from kvrelay.load.target import RouterTarget, Target
from kvrelay.proto.v1 import router_pb2

UNKNOWN_VOCABULARY = 32000
"""Of most models at least so much is ordinary."""


@dataclass(frozen=True, slots=True)
class Whom:
    """What the flags say of the target."""

    router: str
    wan: str = ""
    connections: int = 1
    template: bytes = b""
    """A serialized GenerateRequest."""
    against: str = ""
    """URL of another server; empty: the router is asked."""
    model: str = ""
    vocab: int | None = None
    as_text: bool = False

    def refuse_nonsense(self) -> None:
        """ValueError: flags that do not go together."""
        if self.against:
            try:
                Url.parse(self.against)
            except ValueError as error:
                raise ValueError(f"--against {error}") from None
            wanted = router_pb2.GenerateRequest.FromString(self.template)
            if self.wan or wanted.pipeline or wanted.handoff_mode or wanted.cache_salt:
                raise ValueError("--wan, --pipeline, --handoff-mode and --cache-salt say nothing to --against URL")
        elif self.model or self.as_text:
            raise ValueError("--model and --as-text need --against URL")

    @property
    def name(self) -> str:
        """Of the target, for reports."""
        return self.against or self.router

    @property
    def watched(self) -> tuple[str | None, str | None]:
        """The router and the emulator whose counters surround the run."""
        return (None, None) if self.against else (self.router, self.wan or None)

    @property
    def target(self) -> Target:
        """Opened by each process of the generator."""
        if self.against:
            return OpenAiTarget(self.against, self.model, self.template, self.as_text)
        return RouterTarget(self.router, self.template, self.connections)

    def room(self, fleet: router_pb2.Fleet) -> tuple[int, int | None]:
        """The vocabulary that ids are drawn from, and the tokens that a request may have; None: not known."""
        stages = [stage.info for stage in fleet.stages]
        known = min((stage.vocab_size for stage in stages), default=UNKNOWN_VOCABULARY if self.against else 256)
        return self.vocab or known, min((stage.max_model_tokens for stage in stages), default=None)
