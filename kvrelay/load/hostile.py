"""Clients that misbehave: those who leave, those who read slowly, those who only probe. Pure."""

from dataclasses import dataclass, replace

from kvrelay.load.ids import dice
from kvrelay.load.lengths import Spreading
from kvrelay.load.workload import Ask


@dataclass(frozen=True, slots=True)
class Manner:
    """How a client treats one request."""

    name: str = ""
    """Empty: patiently."""
    leaves_after_s: float | None = None
    """It cancels then, if the answer has not ended."""
    pause_s: float = 0.0
    """Before it reads each next message."""


PATIENT = Manner()


@dataclass(frozen=True, slots=True)
class Hostility:
    """Shares of the requests that are treated so, drawn by the request's seed: equal runs have equal victims."""

    cancel_rate: float = 0.0
    cancel_s: Spreading = Spreading(0.0, 1.0)
    slow_rate: float = 0.0
    slow_pause_s: float = 0.1
    probe_rate: float = 0.0
    """These ask for one token only, as a health check does."""

    def treat(self, ask: Ask) -> tuple[Ask, Manner]:
        """The request as it is sent, and its client's manner."""
        if not (self.cancel_rate or self.slow_rate or self.probe_rate):
            return ask, PATIENT
        chance = dice(ask.seed, "manner", ask.turn)
        at = float(chance.random())
        if at < self.cancel_rate:
            return replace(ask, manner="cancel"), Manner("cancel", leaves_after_s=self.cancel_s.draw(chance))
        if at < self.cancel_rate + self.slow_rate:
            return replace(ask, manner="slow"), Manner("slow", pause_s=self.slow_pause_s)
        if at < self.cancel_rate + self.slow_rate + self.probe_rate:
            return replace(ask, manner="probe", max_tokens=1), Manner("probe")
        return ask, PATIENT
