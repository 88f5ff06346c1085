"""Opening a request's legs: which stage, with what message, fed by whom. Remembers who is who; decides no hand-off."""

import secrets
from collections.abc import Callable, Sequence
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
        asked: Question,
        fleet: Fleet,
        legs: Legs,
        limits: Limits,
        now: Callable[[], Question],
        max_feeds: int,
    ) -> None:
        """`asked` when the request came; `now()` -> the same question about this moment."""
        self._ask = ask
        self._asked = asked
        self._fleet = fleet
        self._legs = legs
        self._limits = limits
        self._now = now
        self._max_feeds = max_feeds
        self._feeds = dict.fromkeys(Role, 0)
        self._sampling = sampling_to_proto(ask.sampling)
        # The first message's own, once there is one: a long prompt is read from Python's objects once, and then copied.
        self._prompt_ids: Sequence[int] = ask.prompt_ids
        self._hashes: Sequence[bytes] = ask.hashes
        self.decode: dict[int, OpenedLeg] = {}
        """Decode leg -> what it is."""
        self.prefill: dict[int, StageView] = {}
        """Prefill stream -> where."""
        self.fed_by: dict[int, tuple[int, ...]] = {}
        """Prefill stream -> the legs it feeds."""
        self._by_transfer: dict[str, OpenedLeg] = {}
        self.local_prefills = 0

    def open(self, route: Route) -> list[tuple[int, Role]]:
        """All legs of the route at once; -> decode legs by number and role. Raises StageFailed if a stage has left."""
        stages = [stage for stage in (route.relay, route.main) if stage is not None]
        legs = self._start(stages, route.prefill, whole=route.main is None, kv_only=False)
        return [(leg.number, leg.stage.description.role) for leg in legs]

    def feed(self, role: Role, *, whole: bool) -> int:
        """One more leg of a role, with the KV pushed to it again; -> its number. Raises NoStage naming the leg."""
        question = self._now()
        stage = planner.pick_role(question, role, self._limits)
        if self._feeds[role] >= self._max_feeds:
            raise NoStage(f"{planner.LEG_NAMES[role]} failed {self._max_feeds} times")
        self._feeds[role] += 1
        prefill = planner.pick_prefill(question, planner.usable(question)[Role.PREFILL], self._limits)
        lacks = question.prompt_tokens - estimate.usable_hit(question, stage, samples=False)
        local = prefill is None or lacks <= self._limits.local_extend_tokens
        try:
            [leg] = self._start([stage], None if local else prefill, whole=whole, kv_only=True)
        except KvrelayError as error:
            raise NoStage(f"{planner.LEG_NAMES[role]}: {error}") from error
        self.local_prefills += local and prefill is None
        return leg.number

    def could_feed(self, role: Role) -> bool:
        """Whether feed() would find a stage now."""
        return self._feeds[role] < self._max_feeds and bool(planner.usable(self._now())[role])

    def leg_of(self, transfer_id: str) -> OpenedLeg | None:
        """Whose KV this transfer brings."""
        return self._by_transfer.get(transfer_id)

    def _start(
        self, stages: Sequence[StageView], prefill: StageView | None, *, whole: bool, kv_only: bool
    ) -> list[OpenedLeg]:
        """Streams to all of them, prefill's first: nothing else is between the client and its first token.

        prefill None: the stages compute their KV themselves. Raises StageFailed before any stream is opened.
        """
        links = [self._fleet.link(stage.description) for stage in stages]
        transfers = ["" if prefill is None else secrets.token_hex(16) for _ in stages]
        stream = self._prefill(prefill, stages, transfers, kv_only=kv_only) if prefill is not None else None
        legs = []
        for stage, link, transfer_id in zip(stages, links, transfers, strict=True):
            opening = self._message(stage, transfer_id, whole=whole)
            number = self._legs.decode(link.open_decode, stage.instance_id, opening)
            site = (prefill or stage).description.site
            leg = self.decode[number] = OpenedLeg(number, stage, transfer_id, site)
            self._by_transfer[transfer_id] = leg
            link.sent(len(self._ask.prompt_ids) if prefill is None else 0)
            legs.append(leg)
        if stream is not None:
            self.fed_by[stream] = tuple(leg.number for leg in legs)
        return legs

    def _message(self, stage: StageView, transfer_id: str, *, whole: bool) -> decode_pb2.OpenLeg:
        ask, description = self._ask, stage.description
        message = decode_pb2.OpenLeg(
            request_id=ask.request_id,
            transfer_id=transfer_id,
            prompt_ids=self._prompt_ids,
            sampling=self._sampling,
            cache_salt=ask.cache_salt,
            epoch=description.epoch,
            local_prefill=not transfer_id,
            block_hashes=self._hashes,
        )
        self._prompt_ids, self._hashes = message.prompt_ids, message.block_hashes
        if description.role is Role.RELAY:
            budget = ask.sampling.max_tokens
            message.output_budget = budget if whole else min(budget, self._limits.relay_budget)
        return message

    def _prefill(
        self,
        stage: StageView,
        receivers: Sequence[StageView],
        transfers: Sequence[str],
        *,
        kv_only: bool,
    ) -> int:
        ask, description = self._ask, stage.description
        targets = [
            KvTarget(
                instance_id=receiver.instance_id,
                address=receiver.description.address,
                epoch=receiver.description.epoch,
                transfer_id=transfer_id,
                role=receiver.description.role,
            )
            for receiver, transfer_id in zip(receivers, transfers, strict=True)
        ]
        request = prefill_pb2.PrefillRequest(
            request_id=ask.request_id,
            prompt_ids=self._prompt_ids,
            sampling=self._sampling,
            targets=[kv_target_to_proto(target) for target in targets],
            cache_salt=ask.cache_salt,
            epoch=description.epoch,
            kv_only=kv_only,
        )
        self._prompt_ids = request.prompt_ids
        link = self._fleet.link(description)
        number = self._legs.prefill(link.open_prefill, description.instance_id, request)
        self.prefill[number] = stage
        hit = estimate.usable_hit(self._asked, stage, samples=not kv_only)
        link.sent(len(ask.prompt_ids) - hit)
        for receiver in receivers:
            link.crosses(receiver.instance_id, estimate.crossing_bytes(self._asked, receiver))
        return number
