"""What prefill says of its pushes to one request's legs: bytes across so far, how each ended. Decides nothing."""

from dataclasses import dataclass, field

from kvrelay.errors import StageFailed
from kvrelay.proto.v1 import prefill_pb2
from kvrelay.telemetry.metrics import RouterMetrics
from services.router import estimate
from services.router.feeding import Feeder
from services.router.report import Record
from services.router.route import Limits

_OUTCOMES = {number: name.removeprefix("OUTCOME_").lower() for name, number in prefill_pb2.PushEnded.Outcome.items()}


@dataclass(frozen=True, slots=True)
class Rest:
    """What must still cross to a leg."""

    bytes: int
    """Payload."""
    rate_bytes_per_s: float
    """Of the link."""


@dataclass(slots=True, eq=False)
class Pushes:
    """The pushes of one attempt."""

    feeder: Feeder
    record: Record
    metrics: RouterMetrics
    limits: Limits
    planned_bytes: int
    """What the plan thought must cross, until the receiver has said what it misses."""
    _progress: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Transfer id -> payload bytes (acked, missing at the start)."""

    def progress(self, told: prefill_pb2.PushProgress) -> None:
        """So many bytes are across."""
        self._progress[told.transfer_id] = (told.payload_bytes_acked, told.payload_bytes_missing)
        self._crossed(told.transfer_id, told.payload_bytes_acked)

    def ended(self, told: prefill_pb2.PushEnded) -> tuple[int, StageFailed] | None:
        """Counts it; -> the leg that will not get its KV by it, and why."""
        leg = self.feeder.leg_of(told.transfer_id)
        if leg is None:
            return None
        self._crossed(told.transfer_id, told.wire_bytes)
        saved = told.blocks_cached * leg.stage.description.layout.block_bytes
        outcome = _OUTCOMES.get(told.outcome, "unknown")
        self.metrics.pushed(
            leg.stage.instance_id, outcome, wire_bytes=told.wire_bytes, saved_bytes=saved, seconds=told.seconds
        )
        if told.outcome == prefill_pb2.PushEnded.OUTCOME_COMMITTED:
            return None
        return leg.number, StageFailed(f"KV did not reach {leg.stage.instance_id}: {told.detail or outcome}")

    def rest(self, number: int) -> Rest | None:
        """None: nobody pushes to this leg."""
        leg = self.feeder.decode.get(number)
        sender = next((self.feeder.prefill[s] for s, fed in self.feeder.fed_by.items() if number in fed), None)
        if leg is None or sender is None:
            return None
        acked, missing = self._progress.get(leg.transfer_id, (0, self.planned_bytes))
        return Rest(missing - acked, estimate.goodput((sender,), sender, leg.stage, self.limits))

    def _crossed(self, transfer_id: str, payload_bytes: int) -> None:
        leg = self.feeder.leg_of(transfer_id)
        if leg is not None and leg.sender_site != leg.stage.description.site:
            self.record.wan_bytes[transfer_id] = payload_bytes
