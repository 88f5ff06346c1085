"""Who takes part: main decode first, then prefill, then the pipeline. Pure decisions over frozen values."""

from collections.abc import Iterable, Sequence

from kvrelay.errors import NoStage
from kvrelay.types import Pipeline, Role
from services.router import estimate
from services.router.route import Limits, Question, Route, StageView

LEG_NAMES = {Role.PREFILL: "prefill", Role.RELAY: "relay decode", Role.MAIN: "main decode"}


def usable(question: Question) -> dict[Role, list[StageView]]:
    """Stages that may be chosen, by role, in the question's order."""
    found: dict[Role, list[StageView]] = {role: [] for role in Role}
    for stage in question.stages:
        if not stage.why_not and (not question.excluded or stage.incarnation not in question.excluded):
            found[stage.description.role].append(stage)
    return found


def why_none(question: Question, role: Role) -> str:
    """What is wrong with every stage of a role."""
    stages = [stage for stage in question.stages if stage.description.role is role]
    if not stages:
        return "none is registered"
    return "; ".join(f"{s.instance_id}: {s.why_not or 'has failed this request'}" for s in stages)


def pick_decode(question: Question, stages: Sequence[StageView], limits: Limits) -> StageView | None:
    """By prompt tokens that its cache lacks, and load in tokens: a hot prefix cannot pin all load on one stage."""
    stages, hits, penalty = _heard(stages), question.hits, limits.load_penalty_tokens
    # Less the prompt's length, which is the same for all.
    costs = [
        penalty * stage.busy
        - (estimate.usable_hit(question, stage, samples=False) if stage.description.instance_id in hits else 0)
        for stage in stages
    ]
    return _cheapest(question, stages, costs, limits)


def pick_prefill(question: Question, stages: Sequence[StageView], limits: Limits) -> StageView | None:
    """By the time of the first token: what is queued there and what its cache lacks."""
    stages = _heard(stages)
    return _cheapest(question, stages, [estimate.prefill_ms(question, stage, limits) for stage in stages], limits)


def _heard(stages: Sequence[StageView]) -> Sequence[StageView]:
    """A stage that has reported nothing yet is taken only if there is no other: silence is not idleness."""
    return [stage for stage in stages if stage.load is not None] or stages


def _cheapest(
    question: Question, stages: Sequence[StageView], costs: Sequence[float], limits: Limits
) -> StageView | None:
    """The stage of the least cost; of equals the least busy; of those the next in turn. None: no stage."""
    if not stages:
        return None
    least = min(costs)
    equal = [stage for stage, cost in zip(stages, costs, strict=True) if cost == least]
    if len(equal) > 1 and limits.load_penalty_tokens:
        idlest = min(stage.busy for stage in equal)
        equal = [stage for stage in equal if stage.busy == idlest]
    return equal[question.turn % len(equal)]


def pick_role(question: Question, role: Role, limits: Limits) -> StageView:
    """A stage for one leg, on its own (a leg is fed again). NoStage names the leg and why."""
    return choose(question, role, usable(question)[role], limits)


def choose(question: Question, role: Role, stages: Sequence[StageView], limits: Limits) -> StageView:
    """One of `stages`, all of that role. NoStage names the leg and why there is none."""
    pick = pick_prefill if role is Role.PREFILL else pick_decode
    return need(question, role, pick(question, stages, limits))


def need(question: Question, role: Role, stage: StageView | None) -> StageView:
    """NoStage, naming the leg and what is wrong with each of its stages, if there is none."""
    if stage is None:
        raise NoStage(f"no usable stage for {LEG_NAMES[role]}: {why_none(question, role)}")
    return stage


def fits(stage: StageView, tokens: int) -> bool:
    """Whether the stage could ever hold so many tokens."""
    description = stage.description
    room = description.pool_blocks * description.layout.block_tokens
    return tokens <= min(room, description.max_model_tokens)


def route(
    question: Question,
    pipeline: Pipeline,
    reason: str,
    limits: Limits,
    *,
    prefill: StageView | None = None,
    relay: StageView | None = None,
    main: StageView | None = None,
    hold_first: bool = False,
    considered: Iterable[str] = (),
    cross: estimate.Crossing | None = None,
) -> Route:
    """Fills in what the chosen legs imply; legs that the pipeline does not have are dropped.

    `cross`: from `prefill` to `main`, if it is known already.
    """
    prefill = prefill if pipeline is not Pipeline.MD else None
    relay = relay if pipeline in (Pipeline.P_RLD_MD, Pipeline.P_RLD) else None
    avoided = 0
    if pipeline is Pipeline.P_RLD:
        avoided = estimate.crossing_bytes(question, main) if prefill and main else 0
        main = cross = None
    elif prefill and main:
        cross = cross or estimate.crossing(question, prefill, main, limits)
    if prefill is not None:
        ttft = cross.ttft_ms if cross else estimate.prefill_ms(question, prefill, limits)
        if relay is None and hold_first and cross is not None:
            ttft = max(ttft, cross.ms)
    else:
        lacks = question.prompt_tokens - (estimate.usable_hit(question, main, samples=True) if main else 0)
        ttft = 1e3 * lacks / limits.prefill_tokens_per_s
    return Route(
        pipeline=pipeline,
        reason=reason,
        prefill=prefill,
        relay=relay,
        main=main,
        hit_prefill_tokens=estimate.usable_hit(question, prefill, samples=True) if prefill else 0,
        hit_relay_tokens=estimate.usable_hit(question, relay, samples=False) if relay else 0,
        hit_main_tokens=estimate.usable_hit(question, main, samples=prefill is None) if main else 0,
        crossing_bytes=cross.bytes if cross else 0,
        crossing_ms=cross.ms if cross else 0.0,
        avoided_bytes=avoided,
        ttft_ms=ttft,
        handoff_mode=question.handoff_mode,
        index_degraded=question.degraded,
        hold_first=hold_first,
        considered=tuple(considered),
    )
