"""The rules by name: `pdd`, and the baselines `pd-local` and `pd-remote`. Pure; knows estimates, no stage's insides."""

from typing import Protocol

from kvrelay.types import Pipeline, Role
from services.router import estimate, planner
from services.router.route import Limits, Question, Route, StageView


class Policy(Protocol):
    """Chooses a request's route."""

    name: str

    def choose(self, question: Question, limits: Limits) -> Route:
        """The route, with its reason. Raises NoStage naming the leg that has no usable stage."""
        ...


class Pdd:
    """Prefill -> relay decode -> main decode, and each shorter way where it is enough."""

    name = "pdd"

    def choose(self, question: Question, limits: Limits) -> Route:
        """See Policy."""
        if question.forced is not None:
            return forced(question, question.forced, limits)
        usable = planner.usable(question)
        main = planner.choose(question, Role.MAIN, usable[Role.MAIN], limits)
        lacks = question.prompt_tokens - estimate.usable_hit(question, main, samples=True)
        if lacks <= limits.local_extend_tokens:
            return planner.route(question, Pipeline.MD, "local-extend", limits, main=main)
        considered = [f"md: {main.instance_id} lacks {lacks} tokens, more than {limits.local_extend_tokens}"]
        prefill = planner.choose(question, Role.PREFILL, usable[Role.PREFILL], limits)
        relay = planner.pick_decode(question, usable[Role.RELAY], limits)
        cross = estimate.crossing(question, prefill, main, limits)
        pipeline, reason = self._pipeline(question, relay, main, cross, limits, considered)
        return planner.route(
            question,
            pipeline,
            reason,
            limits,
            prefill=prefill,
            relay=relay,
            main=main,
            considered=considered,
            cross=cross,
        )

    def _pipeline(
        self,
        question: Question,
        relay: StageView | None,
        main: StageView,
        cross: estimate.Crossing,
        limits: Limits,
        considered: list[str],
    ) -> tuple[Pipeline, str]:
        if cross.stall_ms <= limits.stall_ms:
            considered.append(f"p-rld-md: KV reaches {main.instance_id} {cross.stall_ms:.0f} ms after the first token")
            return Pipeline.P_MD, "kv-in-time"
        considered.append(f"p-md: {cross.stall_ms:.0f} ms of stall, more than {limits.stall_ms:.0f}")
        if relay is None:
            considered.append(f"p-rld-md: {planner.why_none(question, Role.RELAY)}")
            return Pipeline.P_MD, "no-relay"
        if not planner.fits(relay, question.prompt_tokens + min(limits.relay_budget, question.max_tokens)):
            considered.append(f"p-rld-md: {relay.instance_id} has no room for the prompt")
            return Pipeline.P_MD, "no-relay-room"
        answer_ms = question.max_tokens * estimate.itl_ms(relay, limits) * limits.singular_margin
        if answer_ms < cross.stall_ms and planner.fits(relay, question.prompt_tokens + question.max_tokens):
            considered.append(f"p-rld-md: the answer ends within {answer_ms:.0f} ms, before its KV has crossed")
            return Pipeline.P_RLD, "singular"
        return Pipeline.P_RLD_MD, "kv-late"


class PdLocal:
    """Baseline: decode beside prefill; the first token is streamed when the decode stage has the KV."""

    name = "pd-local"

    def choose(self, question: Question, limits: Limits) -> Route:
        """See Policy."""
        return _prefill_decode(question, limits, self.name, near=True)


class PdRemote:
    """Baseline: decode across the WAN; the first token is streamed when the decode stage has the KV."""

    name = "pd-remote"

    def choose(self, question: Question, limits: Limits) -> Route:
        """See Policy."""
        return _prefill_decode(question, limits, self.name, near=False)


POLICIES: dict[str, type[Policy]] = {policy.name: policy for policy in (Pdd, PdLocal, PdRemote)}


def policy(name: str) -> Policy:
    """KeyError: no such policy."""
    return POLICIES[name]()


def forced(question: Question, pipeline: Pipeline, limits: Limits) -> Route:
    """The pipeline that the request asks for. NoStage names the leg that cannot be had."""
    usable, prefill, relay, main = planner.usable(question), None, None, None
    if pipeline is not Pipeline.P_RLD:
        main = planner.choose(question, Role.MAIN, usable[Role.MAIN], limits)
    if pipeline is not Pipeline.MD:
        prefill = planner.choose(question, Role.PREFILL, usable[Role.PREFILL], limits)
    if pipeline in (Pipeline.P_RLD_MD, Pipeline.P_RLD):
        relay = planner.choose(question, Role.RELAY, usable[Role.RELAY], limits)
    return planner.route(question, pipeline, "forced", limits, prefill=prefill, relay=relay, main=main)


def _prefill_decode(question: Question, limits: Limits, reason: str, *, near: bool) -> Route:
    if question.forced is not None:
        return forced(question, question.forced, limits)
    usable = planner.usable(question)
    prefill = planner.choose(question, Role.PREFILL, usable[Role.PREFILL], limits)
    site = prefill.description.site
    mains = [stage for stage in usable[Role.MAIN] if (stage.description.site == site) is near]
    main = planner.choose(question, Role.MAIN, mains, limits)
    return planner.route(question, Pipeline.P_MD, reason, limits, prefill=prefill, main=main, hold_first=True)
