"""The planner chooses what its rules, said plainly, name; what it is told of a stage is up to date."""

import time
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from kvrelay.errors import NoStage
from kvrelay.types import LinkLoad, Role, StageLoad
from services.router import estimate
from services.router.policies import policy
from services.router.route import Limits, Question, StageView
from services.router.stage_link import DialSettings, StageLink
from tests.fakes_stages import described

LIMITS = Limits(local_extend_tokens=0)

small = st.integers(0, 3)
loads = st.builds(
    StageLoad,
    running=small,
    waiting=st.sampled_from([0, 0, 1]),
    queued_tokens=st.sampled_from([0, 100]),
    prefill_tokens_per_s=st.sampled_from([0.0, 500.0, 1000.0]),
    prefill_step_ms=st.sampled_from([0.0, 40.0]),
)
views = st.builds(
    StageView,
    st.builds(described, st.sampled_from(Role), st.sampled_from("abcdefgh"), max_running=st.sampled_from([1, 8])),
    load=st.none() | loads,
    sent_requests=small,
    sent_tokens=st.sampled_from([0, 100]),
    why_not=st.sampled_from(["", "", "", "draining"]),
)
fleets = st.lists(views, max_size=12, unique_by=lambda view: view.instance_id).map(
    lambda found: tuple(sorted(found, key=lambda view: view.instance_id))
)


def plainly(asked: Question, role: Role) -> StageView | None:
    """Of those that have reported, if any has: the cheapest, of equals the idlest, of those the next in turn."""

    def load(stage: StageView) -> int:
        told = stage.load
        here = max(1, stage.description.max_running // 2) if told is None else told.running + 4 * told.waiting
        return LIMITS.load_penalty_tokens * (here + stage.sent_requests)

    def price(stage: StageView) -> tuple[bool, float, int]:
        lacks = asked.prompt_tokens - estimate.usable_hit(asked, stage, samples=role is Role.PREFILL)
        cost: float = lacks + load(stage)
        if role is Role.PREFILL:
            told = stage.load or StageLoad()
            rate = told.prefill_tokens_per_s or LIMITS.prefill_tokens_per_s
            cost = told.prefill_step_ms + 1e3 * (told.queued_tokens + stage.sent_tokens) / rate + 1e3 * lacks / rate
        return stage.load is None, cost, load(stage)

    open_to = [
        stage
        for stage in asked.stages
        if stage.description.role is role and not stage.why_not and stage.incarnation not in asked.excluded
    ]
    equal = [stage for stage in open_to if price(stage) == min(map(price, open_to))]
    return equal[asked.turn % len(equal)] if equal else None


@given(
    fleets,
    st.dictionaries(st.sampled_from("abcdefgh"), st.sampled_from([0, 16, 31, 160, 400])),
    st.frozensets(st.tuples(st.sampled_from("abcdefgh"), st.just(1)), max_size=2),
    small,
)
def test_the_choice_is_the_one_that_the_rules_name(
    fleet: tuple[StageView, ...], hits: dict[str, int], excluded: frozenset[tuple[str, int]], turn: int
) -> None:
    asked = Question(170, 1000, fleet, hits, excluded=excluded, turn=turn)
    wanted = {role: plainly(asked, role) for role in Role}
    try:
        route = policy("pdd").choose(asked, LIMITS)
    except NoStage:
        assert wanted[Role.MAIN] is None or wanted[Role.PREFILL] is None
        return
    assert route.main is wanted[Role.MAIN]
    assert route.prefill is wanted[Role.PREFILL]
    assert route.relay in (None, wanted[Role.RELAY])


@given(fleets, st.dictionaries(st.sampled_from("abcdefgh"), st.sampled_from([0, 16, 160])))
def test_a_route_says_what_the_estimates_say(fleet: tuple[StageView, ...], hits: dict[str, int]) -> None:
    asked = Question(170, 1000, fleet, hits)
    try:
        route = policy("pdd").choose(asked, LIMITS)
    except NoStage:
        return
    assert route.prefill is not None
    assert route.main is not None
    cross = estimate.crossing(asked, route.prefill, route.main, LIMITS)
    assert (route.crossing_bytes, route.crossing_ms) == (cross.bytes, cross.ms)
    assert route.ttft_ms == estimate.prefill_ms(asked, route.prefill, LIMITS)
    assert route.crossing_bytes == estimate.crossing_bytes(asked, route.main)


def link() -> StageLink:
    """Of a stage that has said who it is."""
    found = StageLink("127.0.0.1:1", DialSettings(), lambda link, stage: None, lambda link: None)
    found.description = described(Role.PREFILL, "p0")
    return found


async def test_a_push_counts_until_the_sender_reports_it_itself() -> None:
    stage, now = link(), time.monotonic()
    stage.crosses("m0", 5)
    stage.crosses("m1", 7)
    told = stage.view(now)
    assert told is not None
    assert told.sent_crossings == (("m0", 5), ("m1", 7))
    later = stage.view(now + 10)
    assert later is not None
    assert later.sent_crossings == ()


async def test_what_was_sent_to_a_stage_is_in_its_next_view() -> None:
    stage, now = link(), time.monotonic()
    before = stage.view(now)
    assert stage.view(now) is before
    stage.sent(100)
    after = stage.view(now)
    assert after is not None
    assert (after.sent_requests, after.sent_tokens) == (1, 100)


def test_how_busy_a_stage_is_follows_from_its_load() -> None:
    view = StageView(described(Role.MAIN, "m0"), StageLoad(running=3, waiting=2), sent_requests=1)
    assert view.busy == 3 + 4 * 2 + 1
    assert replace(view, load=None).busy == 8 // 2 + 1
    assert replace(view, load=StageLoad(links=(LinkLoad("m1", 1.0, 0),)), sent_requests=0).busy == 0
