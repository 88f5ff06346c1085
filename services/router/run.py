"""One request between its plans: what carries over from attempt to attempt, and how it is reported in the end."""

import asyncio
import logging
from dataclasses import replace
from types import TracebackType
from typing import Self

from kvrelay.errors import KvrelayError, NoStage, Overloaded
from kvrelay.proto.v1 import router_pb2
from kvrelay.rpc.convert import finish_reason_to_proto
from kvrelay.text.stream import TextStream
from kvrelay.types import FinishReason, Pipeline, Role, Source
from services.router.answer import Answer
from services.router.client import ClientStream
from services.router.conductor import Conductor
from services.router.feeding import Feeder
from services.router.fence import HandoffRules
from services.router.handoff import Handoff
from services.router.input import Ask
from services.router.legs import FleetChanged, Legs
from services.router.performing import RouteBroke
from services.router.pushes import Pushes
from services.router.report import Record
from services.router.rooms import Rooms
from services.router.route import Question, Route, StageView

log = logging.getLogger(__name__)

_SETTLE_S = 0.5
"""How long the speaking stage may take to say Finished after its last token, before its stream is cut."""


class Run:
    """One request from its plan to its report."""

    def __init__(self, rooms: Rooms, ask: Ask, record: Record, question: Question) -> None:
        text = TextStream(rooms.tokenizer, ask.stop, ask.sampling.stop_token_ids) if ask.return_text else None
        self.answer = Answer(ask.sampling, rooms.fleet.example().eos_token_ids, text)
        self._rooms = rooms
        self._ask = ask
        self._record = record
        self._question = question
        self._excluded: dict[tuple[str, int], bool] = {}
        """Incarnations that have failed this request -> whether they have been seen unusable since."""
        self._attempts = 0
        self._planned: Route | None = None
        self._uncounted: Route | None = None
        """The first plan, until it is logged and counted."""
        self._last_error: KvrelayError | None = None
        self._conductor: Conductor | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._count_first_plan()
        await self._close()

    @property
    def reason(self) -> FinishReason:
        """Why the answer is complete; only once it is."""
        assert self.answer.reason is not None
        return self.answer.reason

    def plan(self, client: ClientStream) -> Conductor:
        """Freezes a route; the client will be told of the first one. Raises NoStage, or Overloaded if that is why."""
        self._attempts += 1
        try:
            question = self._question if self._attempts == 1 else self._now()
            route = self._rooms.policy.choose(question, self._rooms.limits)
        except NoStage:
            if isinstance(self._last_error, Overloaded):
                raise self._last_error from None
            raise
        self._record.mark("planned")
        if self._planned is None:
            self._planned = self._uncounted = route
            client.start(lambda: self._started(route), self._count_first_plan)
        else:
            self._note(route)
        if route.reason in ("no-relay", "no-relay-room"):
            self._fallback(route.reason)
        self._conductor = self._conducting(route, client)
        return self._conductor

    async def broke(self, broke: RouteBroke) -> None:
        """An attempt ended before the first token. Raises its error if it was the last one."""
        self._count_first_plan()
        await self._close()
        self._last_error = broke.error
        self._fallback("planned_again")
        if self._attempts >= self._rooms.settings.max_attempts:
            raise broke.error

    def completed(self, conductor: Conductor) -> router_pb2.Completed:
        """The client's last message."""
        answer, handoff = self.answer, conductor.handoff
        assert self._planned is not None
        ended = self._pipeline(conductor)
        reason = "singular-cut" if conductor.cut else conductor.route.reason
        report = self._record.report(self._planned, ended, reason, handoff.report)
        self._observe(conductor, ended)
        return router_pb2.Completed(
            reason=finish_reason_to_proto(self.reason),
            stop_string=answer.stop_string,
            usage=self._record.usage(answer, len(self._ask.prompt_ids)),
            report=report,
            text=answer.last_text,
        )

    async def hand_over(self, conductor: Conductor) -> None:
        """The answer is complete: main decode goes on taking it in, however slowly the client reads, or is closed."""
        if conductor.handoff.draining:
            if not conductor.cut and self._rooms.drains.adopt(conductor):
                self._conductor = None
            await self._close()

    async def settle(self) -> None:
        """The client has everything: the stage that spoke last may say Finished; then all legs are closed."""
        conductor = self._conductor
        if conductor is not None and not conductor.handoff.over:
            try:
                async with asyncio.timeout(_SETTLE_S):
                    await conductor.settle()
            except TimeoutError:
                log.info("a stage did not say Finished after its last token")
        await self._close()

    def _started(self, route: Route) -> router_pb2.Started:
        """The client's first message. Asked for once the legs are being opened: nothing here may delay them."""
        return router_pb2.Started(
            request_id=self._ask.request_id,
            seed=self._ask.sampling.seed,
            prompt_tokens=len(self._ask.prompt_ids),
            route=self._record.route(route),
        )

    def _count_first_plan(self) -> None:
        """Once: when the client has been told, or when it has come to nothing before."""
        route, self._uncounted = self._uncounted, None
        if route is not None:
            self._note(route)
            self._count_plan(route)

    def _note(self, route: Route) -> None:
        self._rooms.prefixes.remember(self._ask, route)
        log.info("route: %s (%s)", route.pipeline, route.reason)

    async def _close(self) -> None:
        conductor, self._conductor = self._conductor, None
        if conductor is not None:
            await conductor.aclose()

    def _now(self) -> Question:
        return replace(self._question, stages=self._rooms.fleet.views(), excluded=frozenset(self._excluded))

    def _conducting(self, route: Route, client: ClientStream) -> Conductor:
        rooms, settings = self._rooms, self._rooms.settings
        legs = Legs(rooms.open_legs)
        legs.until_closed(rooms.fleet.watch(lambda: legs.tell(FleetChanged())))
        rules = HandoffRules(
            mode=route.handoff_mode,
            handoff_tokens=settings.handoff_tokens,
            catch_up_tokens=settings.catch_up_tokens,
            handoff_rounds=settings.handoff_rounds,
            hold_first=route.hold_first,
        )
        feeder = Feeder(self._ask, self._question, rooms.fleet, legs, rooms.limits, self._now, settings.max_attempts)
        conductor = Conductor(
            route=route,
            legs=legs,
            feeder=feeder,
            pushes=Pushes(feeder, self._record, rooms.metrics, rooms.limits, route.crossing_bytes),
            handoff=Handoff(self.answer, rules),
            answer=self.answer,
            client=client,
            record=self._record,
            metrics=rooms.metrics,
            patience=rooms.patience,
            failed=self._failed,
            forgive=self._forgive,
            fleet_changed=self._fleet_changed,
            fallback=self._fallback,
        )
        conductor.handoff.relay_busy = lambda: self._relay_busy(conductor)
        return conductor

    def _relay_busy(self, conductor: Conductor) -> bool:
        """Has the relay a queue or few free slots, in a report fresh enough to believe?"""
        settings, relay = self._rooms.settings, conductor.handoff.relay
        if relay is None:
            return False
        stage = conductor.feeder.decode[relay.number].stage.description
        load = self._rooms.fleet.fresh_load(stage, settings.load_fresh_ms / 1e3)
        if load is None:
            return False
        slots = load.max_running or stage.max_running
        return load.waiting > 0 or slots - load.running < settings.relay_busy_free_ratio * slots

    def _failed(self, stage: StageView) -> None:
        now = next((view for view in self._rooms.fleet.views() if view.incarnation == stage.incarnation), None)
        usable = now is not None and not now.why_not
        if now is not None and usable and now.joins > stage.joins:
            return  # it was out of reach, which the leg has noticed later than the fleet, and is back
        self._excluded[stage.incarnation] = not usable

    def _forgive(self, stage: StageView) -> None:
        self._excluded.pop(stage.incarnation, None)

    def _fleet_changed(self) -> None:
        """Who was gone and is back (the WAN was down) may be chosen again."""
        usable = {view.incarnation for view in self._rooms.fleet.views() if not view.why_not}
        for incarnation, was_gone in list(self._excluded.items()):
            if incarnation not in usable:
                self._excluded[incarnation] = True
            elif was_gone:
                del self._excluded[incarnation]

    def _fallback(self, reason: str) -> None:
        log.info("fallback: %s", reason)
        self._record.fallbacks.append(reason)
        self._rooms.fallback(reason)

    def _count_plan(self, route: Route) -> None:
        rooms, key = self._rooms, f"{route.pipeline}/{route.reason}"
        rooms.metrics.requests.labels(route.pipeline, route.reason).inc()
        rooms.metrics.prompt_tokens.inc(len(self._ask.prompt_ids))
        rooms.tally.requests[key] = rooms.tally.requests.get(key, 0) + 1
        if route.reason == "singular":
            rooms.metrics.singular.labels("bound").inc()
            rooms.metrics.singular_saved_bytes.inc(route.avoided_bytes)

    def _pipeline(self, conductor: Conductor) -> Pipeline:
        """The legs that took part in the end."""
        relayed = self.answer.by_source[Source.RELAY] > 0
        mained = self.answer.by_source[Source.MAIN] > 0 or (conductor.handoff.draining and not conductor.cut)
        if relayed:
            return Pipeline.P_RLD_MD if mained else Pipeline.P_RLD
        if mained:
            return Pipeline.P_MD if self.answer.by_source[Source.PREFILL] else Pipeline.MD
        return conductor.route.pipeline

    def _observe(self, conductor: Conductor, ended: Pipeline) -> None:
        metrics, record, handoff = self._rooms.metrics, self._record, conductor.handoff.report
        metrics.answered(ended, record.elapsed_s)
        metrics.max_gap.observe(record.max_gap_s)
        metrics.relay_dropped.inc(handoff.relay_dropped)
        metrics.hits(
            prefill=record.cached.get(Role.PREFILL),
            relay=record.cached.get(Role.RELAY),
            main=record.cached.get(Role.MAIN),
        )
        if handoff.mode is not None:
            metrics.handoffs.labels(handoff.mode).inc()
            metrics.handoff_ids.observe(handoff.ids)
            if record.stall_s is not None:
                metrics.handoff_stall.labels(handoff.mode).observe(record.stall_s)
        mains = [leg.stage for leg in conductor.feeder.decode.values() if leg.stage.description.role is Role.MAIN]
        if mains and not conductor.cut and mains[-1].description.prefix_cache:
            # KV of the last id is computed by the step that would follow.
            known, block_tokens = self.answer.ids[:-1], mains[-1].description.layout.block_tokens
            self._rooms.prefixes.remember_answer(self._ask, mains[-1].instance_id, known, block_tokens)
