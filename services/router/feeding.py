"""Opening a request's legs: which stage, with what message, fed by whom. Remembers who is who; decides no hand-off."""

import uuid
from collections.abc import Callable
from dataclasses import dataclass

from kvrelay.errors import KvrelayError, NoStage
from kvrelay.proto.v1 import decode_pb2, prefill_pb2
from kvrelay.rpc.convert import kv_target_to_proto, sampling_to_proto
from kvrelay.types import KvTarget, Role
from services.router import estimate, planner
from services.router.fleet import Fleet
from services.router.input import Ask
from services.router.legs import Legs
from services.router.route import Limits, Question, Route, StageView


@dataclass(frozen=True, slots=True)
class OpenedLeg:
    """A decode leg that was opened."""

    number: int
    stage: StageView
    transfer_id: str
    """Empty: it computes its KV itself."""
    sender_site: str
    """Where its KV comes from; its own site if it computes it."""


class Feeder:
    """Opens the streams of one attempt, and more of them when a leg must be fed again."""

    def __init__(
        self,
        ask: Ask,
        fleet: Fleet,
        legs: Legs,
        limits: Limits,
        question: Callable[[], Question],
        max_feeds: int,
    ) -> None:
        self._ask = ask
        self._fleet = fleet
        self._legs = legs
        self._limits = limits
        self._question = question
        self._max_feeds = max_feeds
        self._feeds = dict.fromkeys(Role, 0)
        self.decode: dict[int, OpenedLeg] = {}
        """Decode leg -> what it is."""
        self.prefill: dict[int, StageView] = {}
        """Prefill stream -> where."""
        self.fed_by: dict[int, tuple[int, ...]] = {}
        """Prefill stream -> the legs it feeds."""
        self.local_prefills = 0

    def open(self, route: Route) -> list[tuple[int, Role]]:
        """All legs of the route at once; -> decode legs by number and role. Raises StageFailed if a stage has left."""
        whole = route.main is None
        stages = [stage for stage in (route.relay, route.main) if stage is not None]
        legs = [self._open(stage, route.prefill, whole=whole) for stage in stages]
        if route.prefill is not None:
            self._prefill(route.prefill, legs, kv_only=False)
        return [(leg.number, leg.stage.description.role) for leg in legs]

    def feed(self, role: Role, *, whole: bool) -> int:
        """One more leg of a role, with the KV pushed to it again; -> its number. Raises NoStage naming the leg."""
        question = self._question()
        stage = planner.pick_role(question, role, self._limits)
        if self._feeds[role] >= self._max_feeds:
            raise NoStage(f"{planner.LEG_NAMES[role]} failed {self._max_feeds} times")
        self._feeds[role] += 1
        prefill = planner.pick_prefill(question, self._limits)
        lacks = question.prompt_tokens - estimate.usable_hit(question, stage, samples=False)
        local = prefill is None or lacks <= self._limits.local_extend_tokens
        try:
            leg = self._open(stage, None if local else prefill, whole=whole)
            if prefill is not None and not local:
                self._prefill(prefill, [leg], kv_only=True)
        except KvrelayError as error:
            raise NoStage(f"{planner.LEG_NAMES[role]}: {error}") from error
        self.local_prefills += local and prefill is None
        return leg.number

    def could_feed(self, role: Role) -> bool:
        """Whether feed() would find a stage now."""
        return self._feeds[role] < self._max_feeds and bool(planner.usable(self._question(), role))

    def leg_of(self, transfer_id: str) -> OpenedLeg | None:
        """Whose KV this transfer brings."""
        return next((leg for leg in self.decode.values() if leg.transfer_id == transfer_id), None)

    def _open(self, stage: StageView, prefill: StageView | None, *, whole: bool) -> OpenedLeg:
        """prefill None: the stage computes its KV itself."""
        ask, description, local = self._ask, stage.description, prefill is None
        message = decode_pb2.OpenLeg(
            request_id=ask.request_id,
            transfer_id="" if local else uuid.uuid4().hex,
            prompt_ids=ask.prompt_ids,
            sampling=sampling_to_proto(ask.sampling),
            cache_salt=ask.cache_salt,
            epoch=description.epoch,
            local_prefill=local,
            block_hashes=ask.hashes,
        )
        if description.role is Role.RELAY:
            budget = ask.sampling.max_tokens
            message.output_budget = budget if whole else min(budget, self._limits.relay_budget)
        number = self._legs.decode(self._fleet.channel(description), description.instance_id, message)
        site = prefill.description.site if prefill is not None else description.site
        leg = OpenedLeg(number, stage, message.transfer_id, site)
        self.decode[number] = leg
        self._fleet.sent(description, len(ask.prompt_ids) if local else 0)
        return leg

    def _prefill(self, stage: StageView, legs: list[OpenedLeg], *, kv_only: bool) -> None:
        ask, description = self._ask, stage.description
        targets = [
            KvTarget(
                instance_id=leg.stage.instance_id,
                address=leg.stage.description.address,
                epoch=leg.stage.description.epoch,
                transfer_id=leg.transfer_id,
                role=leg.stage.description.role,
            )
            for leg in legs
        ]
        request = prefill_pb2.PrefillRequest(
            request_id=ask.request_id,
            prompt_ids=ask.prompt_ids,
            sampling=sampling_to_proto(ask.sampling),
            targets=[kv_target_to_proto(target) for target in targets],
            cache_salt=ask.cache_salt,
            epoch=description.epoch,
            kv_only=kv_only,
        )
        number = self._legs.prefill(self._fleet.channel(description), description.instance_id, request)
        self.prefill[number] = stage
        self.fed_by[number] = tuple(leg.number for leg in legs)
        question = self._question()
        hit = estimate.usable_hit(question, stage, samples=not kv_only)
        self._fleet.sent(description, len(ask.prompt_ids) - hit)
        for leg in legs:
            self._fleet.crosses(description, leg.stage.description, estimate.crossing_bytes(question, leg.stage))
