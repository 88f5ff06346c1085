"""Who takes part: main decode first, then prefill, then the pipeline. Pure decisions over frozen values."""

from collections.abc import Callable, Iterable

from kvrelay.errors import NoStage
from kvrelay.types import Pipeline, Role
from services.router import estimate
from services.router.route import Limits, Question, Route, StageView

LEG_NAMES = {Role.PREFILL: "prefill", Role.RELAY: "relay decode", Role.MAIN: "main decode"}


def usable(question: Question, role: Role, *, site: str | None = None, not_site: str | None = None) -> list[StageView]:
    """Stages of a role (and site) that may be chosen, in a stable order."""
    stages = [stage for stage in question.stages if stage.description.role is role and not stage.why_not]
    if question.excluded:
        stages = [stage for stage in stages if stage.incarnation not in question.excluded]
    if site is not None or not_site is not None:
        stages = [s for s in stages if site in (None, s.description.site) and not_site != s.description.site]
    return sorted(stages, key=lambda stage: stage.description.instance_id)


def why_none(question: Question, role: Role) -> str:
    """What is wrong with every stage of a role."""
    stages = [stage for stage in question.stages if stage.description.role is role]
    if not stages:
        return "none is registered"
    return "; ".join(f"{s.instance_id}: {s.why_not or 'has failed this request'}" for s in stages)


def pick(
    question: Question, stages: Iterable[StageView], cost: Callable[[StageView, int], float], limits: Limits
) -> StageView | None:
    """The cheapest; of equals the least loaded; of those the next in turn. None: no stage.

    `cost` is given a stage and its load in tokens. A stage that has reported nothing yet is taken only if there is no
    other: silence is not idleness.
    """
    best: tuple[bool, float, int] | None = None
    equal: list[StageView] = []
    for stage in stages:
        load = estimate.load_tokens(stage, limits)
        price = (stage.load is None, cost(stage, load), load)
        if best is None or price < best:
            best, equal = price, [stage]
        elif price == best:
            equal.append(stage)
    return equal[question.turn % len(equal)] if equal else None


def pick_decode(question: Question, stages: Iterable[StageView], limits: Limits) -> StageView | None:
    """By prompt tokens that its cache lacks, and load in tokens: a hot prefix cannot pin all load on one stage."""

    def cost(stage: StageView, load: int) -> float:
        return question.prompt_tokens - estimate.usable_hit(question, stage, samples=False) + load

    return pick(question, stages, cost, limits)


def pick_prefill(question: Question, limits: Limits) -> StageView | None:
    """By the time of the first token: what is queued there and what its cache lacks."""
    stages = usable(question, Role.PREFILL)
    return pick(question, stages, lambda stage, _: estimate.prefill_ms(question, stage, limits), limits)


def pick_role(question: Question, role: Role, limits: Limits) -> StageView:
    """A stage for one leg, on its own (a leg is fed again). NoStage names the leg and why."""
    if role is Role.PREFILL:
        stage = pick_prefill(question, limits)
    else:
        stage = pick_decode(question, usable(question, role), limits)
    return need(question, role, stage)


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
) -> Route:
    """Fills in what the chosen legs imply; legs that the pipeline does not have are dropped."""
    prefill = prefill if pipeline is not Pipeline.MD else None
    relay = relay if pipeline in (Pipeline.P_RLD_MD, Pipeline.P_RLD) else None
    wanted = main
    main = main if pipeline is not Pipeline.P_RLD else None
    avoided = estimate.crossing(question, prefill, wanted, limits).bytes if prefill and wanted and not main else 0
    cross = estimate.crossing(question, prefill, main, limits) if prefill and main else None
    if prefill is not None:
        ttft = estimate.prefill_ms(question, prefill, limits)
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
