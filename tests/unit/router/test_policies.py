"""The routes that policies choose, over tables of frozen inputs."""

from dataclasses import replace
from typing import Any

import pytest

from kvrelay.errors import NoStage
from kvrelay.types import LinkLoad, Pipeline, Role, StageLoad
from services.router import estimate, planner
from services.router.policies import POLICIES, policy
from services.router.route import Limits, Question, StageView
from tests.fakes_stages import LAYOUT, described

IDLE = StageLoad(max_running=8, blocks_total=1024, blocks_free=1024, prefill_tokens_per_s=1000.0, step_ms=20.0)
BLOCK = LAYOUT.block_bytes


def stage(role: Role, name: str, load: StageLoad | None = IDLE, why_not: str = "", **changes: Any) -> StageView:
    return StageView(described(role, name, **changes), load=load, why_not=why_not)


def question(*stages: StageView, prompt: int = 1600, max_tokens: int = 1000, **more: Any) -> Question:
    fleet = stages or (stage(Role.PREFILL, "p0"), stage(Role.RELAY, "r0"), stage(Role.MAIN, "m0"))
    return Question(prompt_tokens=prompt, max_tokens=max_tokens, stages=fleet, **more)


def link(goodput: float, pending: int = 0, peer: str = "m0") -> StageView:
    small = (pending // 50,) * 50 if pending else ()
    load = replace(IDLE, links=(LinkLoad(peer, goodput, pending, small),))
    return stage(Role.PREFILL, "p0", load)


# 1600 tokens = 100 blocks; prefill takes 1.6 s at 1000 tokens/s.
@pytest.mark.parametrize(
    ("asked", "pipeline", "reason"),
    [
        pytest.param(question(), Pipeline.P_MD, "kv-in-time", id="fast-link"),
        pytest.param(
            question(link(BLOCK * 10.0), stage(Role.RELAY, "r0"), stage(Role.MAIN, "m0")),
            Pipeline.P_RLD_MD,
            "kv-late",
            id="slow-link",
        ),
        pytest.param(
            question(link(BLOCK * 10.0), stage(Role.RELAY, "r0"), stage(Role.MAIN, "m0"), hits={"m0": 1584}),
            Pipeline.MD,
            "local-extend",
            id="main-has-nearly-all",
        ),
        pytest.param(
            question(link(BLOCK * 50.0), stage(Role.RELAY, "r0"), stage(Role.MAIN, "m0"), hits={"m0": 1440}),
            Pipeline.P_MD,
            "kv-in-time",
            id="high-hit-at-main",
        ),
        pytest.param(
            question(link(BLOCK * 50.0), stage(Role.RELAY, "r0"), stage(Role.MAIN, "m0"), hits={"m0": 800}),
            Pipeline.P_MD,
            "kv-in-time",
            id="crosses-while-prefill-computes",
        ),
        pytest.param(
            question(link(BLOCK * 50.0), stage(Role.RELAY, "r0"), stage(Role.MAIN, "m0"), hits={"m0": 800, "p0": 1584}),
            Pipeline.P_RLD_MD,
            "kv-late",
            id="hit-at-prefill-but-not-at-main",
        ),
        pytest.param(
            question(link(BLOCK * 1e3, pending=BLOCK * 5000), stage(Role.RELAY, "r0"), stage(Role.MAIN, "m0")),
            Pipeline.P_RLD_MD,
            "kv-late",
            id="link-is-full",
        ),
        pytest.param(
            question(link(BLOCK * 10.0), stage(Role.MAIN, "m0")), Pipeline.P_MD, "no-relay", id="no-relay-stage"
        ),
        pytest.param(
            question(link(BLOCK * 10.0), stage(Role.RELAY, "r0", pool_blocks=64), stage(Role.MAIN, "m0")),
            Pipeline.P_MD,
            "no-relay-room",
            id="relay-too-small",
        ),
        pytest.param(
            question(link(BLOCK * 1.0), stage(Role.RELAY, "r0"), stage(Role.MAIN, "m0"), max_tokens=500),
            Pipeline.P_RLD,
            "singular",
            id="surely-ends-before-its-kv-has-crossed",
        ),
        pytest.param(
            question(link(BLOCK * 1.0), stage(Role.RELAY, "r0"), stage(Role.MAIN, "m0"), max_tokens=2480),
            Pipeline.P_RLD_MD,
            "kv-late",
            id="may-end-after-its-kv-has-crossed",
        ),
    ],
)
def test_pdd_chooses_the_pipeline(asked: Question, pipeline: Pipeline, reason: str) -> None:
    route = policy("pdd").choose(asked, Limits())
    assert (route.pipeline, route.reason) == (pipeline, reason)
    assert (route.prefill is None) == (pipeline is Pipeline.MD)
    assert (route.relay is not None) == (pipeline in (Pipeline.P_RLD_MD, Pipeline.P_RLD))
    assert (route.main is None) == (pipeline is Pipeline.P_RLD)


def test_pdd_says_why_it_did_not_choose_otherwise() -> None:
    asked = question(link(BLOCK * 10.0), stage(Role.RELAY, "r0"), stage(Role.MAIN, "m0"))
    route = policy("pdd").choose(asked, Limits())
    assert any(text.startswith("md:") for text in route.considered)
    assert any(text.startswith("p-md:") for text in route.considered)


def test_the_singular_rule_counts_the_bytes_that_it_saves() -> None:
    asked = question(link(BLOCK * 1.0), stage(Role.RELAY, "r0"), stage(Role.MAIN, "m0"), max_tokens=100)
    assert policy("pdd").choose(asked, Limits()).avoided_bytes == 100 * BLOCK


@pytest.mark.parametrize(("role", "name"), [(Role.MAIN, "main decode"), (Role.PREFILL, "prefill")])
def test_a_leg_without_a_usable_stage_is_named(role: Role, name: str) -> None:
    stages = [stage(r, r.value, why_not="draining" if r is role else "") for r in Role]
    with pytest.raises(NoStage, match=f"{name}.*draining"):
        policy("pdd").choose(question(*stages), Limits())


def test_a_hot_prefix_does_not_pin_all_load_on_one_main_stage() -> None:
    busy = replace(IDLE, running=30)
    asked = question(stage(Role.PREFILL, "p0"), stage(Role.MAIN, "m0", busy), stage(Role.MAIN, "m1"), hits={"m0": 1600})
    route = policy("pdd").choose(asked, Limits())
    assert route.main is not None
    assert route.main.instance_id == "m1"


def test_the_cache_decides_while_load_is_alike() -> None:
    asked = question(stage(Role.PREFILL, "p0"), stage(Role.MAIN, "m0"), stage(Role.MAIN, "m1"), hits={"m1": 800})
    route = policy("pdd").choose(asked, Limits())
    assert route.main is not None
    assert route.main.instance_id == "m1"
    assert route.hit_main_tokens == 800


def test_equal_stages_take_turns() -> None:
    fleet = (stage(Role.PREFILL, "p0"), stage(Role.PREFILL, "p1"), stage(Role.MAIN, "m0"), stage(Role.MAIN, "m1"))
    chosen = [policy("pdd").choose(question(*fleet, turn=turn), Limits()) for turn in range(4)]
    assert {route.main.instance_id for route in chosen if route.main} == {"m0", "m1"}
    assert {route.prefill.instance_id for route in chosen if route.prefill} == {"p0", "p1"}


def test_a_stage_without_a_load_report_is_not_idle() -> None:
    fleet = (stage(Role.PREFILL, "p0"), stage(Role.MAIN, "m0", load=None), stage(Role.MAIN, "m1"))
    for turn in range(4):
        route = policy("pdd").choose(question(*fleet, turn=turn), Limits())
        assert route.main is not None
        assert route.main.instance_id == "m1"
    silent = (stage(Role.PREFILL, "p0", load=None), stage(Role.PREFILL, "p1"), stage(Role.MAIN, "m0"))
    for turn in range(4):
        route = policy("pdd").choose(question(*silent, turn=turn), Limits())
        assert route.prefill is not None
        assert route.prefill.instance_id == "p1"


def test_what_was_sent_since_the_last_report_counts_as_load() -> None:
    fresh = StageView(described(Role.PREFILL, "p0"), IDLE, sent_requests=1, sent_tokens=5000)
    asked = question(fresh, stage(Role.PREFILL, "p1"), stage(Role.MAIN, "m0"))
    route = policy("pdd").choose(asked, Limits())
    assert route.prefill is not None
    assert route.prefill.instance_id == "p1"


def test_an_instance_that_failed_the_request_is_not_chosen_but_its_restart_is() -> None:
    fleet = (stage(Role.PREFILL, "p0"), stage(Role.MAIN, "m0", epoch=2))
    assert policy("pdd").choose(question(*fleet, excluded=frozenset({("m0", 1)})), Limits()).main is not None
    with pytest.raises(NoStage, match="m0: has failed this request"):
        policy("pdd").choose(question(*fleet, excluded=frozenset({("m0", 2)})), Limits())


@pytest.mark.parametrize("name", list(POLICIES))
@pytest.mark.parametrize("pipeline", list(Pipeline))
def test_a_forced_pipeline_is_obeyed_by_every_policy(name: str, pipeline: Pipeline) -> None:
    route = policy(name).choose(question(forced=pipeline), Limits())
    assert (route.pipeline, route.reason) == (pipeline, "forced")


def test_the_baselines_decode_near_or_far_and_hold_the_first_token() -> None:
    fleet = (stage(Role.PREFILL, "p0"), stage(Role.MAIN, "near", site="a"), stage(Role.MAIN, "far", site="b"))
    local = policy("pd-local").choose(question(*fleet), Limits())
    remote = policy("pd-remote").choose(question(*fleet), Limits())
    assert (local.main and local.main.instance_id, local.hold_first) == ("near", True)
    assert (remote.main and remote.main.instance_id, remote.hold_first) == ("far", True)
    with pytest.raises(NoStage, match="main decode"):
        policy("pd-local").choose(question(), Limits())


def test_hits_are_usable_in_whole_blocks_and_a_sampler_must_compute_something() -> None:
    main = stage(Role.MAIN, "m0")
    for prompt, hit, held, sampled in [(32, 32, 32, 16), (33, 32, 32, 32), (32, 31, 16, 16), (15, 15, 0, 0)]:
        asked = question(main, prompt=prompt, hits={"m0": hit})
        assert estimate.usable_hit(asked, main, samples=False) == held
        assert estimate.usable_hit(asked, main, samples=True) == sampled


def test_nothing_crosses_to_a_stage_that_holds_every_whole_block() -> None:
    asked = question(prompt=40, hits={"m0": 32})
    crossing = estimate.crossing(asked, asked.stages[0], asked.stages[2], Limits())
    assert (crossing.bytes, crossing.ms, crossing.stall_ms) == (0, 0.0, 0.0)


def test_a_link_nobody_has_measured_is_as_fast_as_others_between_the_sites() -> None:
    load = replace(IDLE, links=(LinkLoad("m0", 10.0, 0), LinkLoad("m1", 30.0, 0), LinkLoad("r0", 999.0, 0)))
    fleet = (
        stage(Role.PREFILL, "p0", load),
        stage(Role.PREFILL, "p1"),
        stage(Role.RELAY, "r0"),
        stage(Role.MAIN, "m0"),
        stage(Role.MAIN, "m1"),
        stage(Role.MAIN, "m2"),
    )
    p0, p1, r0, m0, _, m2 = fleet
    assert estimate.goodput(fleet, p0, m0, Limits()) == 10.0
    assert estimate.goodput(fleet, p0, m2, Limits()) == 20.0
    assert estimate.goodput(fleet, p1, m2, Limits()) == 20.0
    assert estimate.goodput(fleet, p1, r0, Limits()) == 999.0
    assert estimate.goodput((p1, m0), p1, m0, Limits()) == Limits().wan_rate_bytes_per_s


def test_a_leg_that_is_fed_again_names_what_is_wrong_with_each_stage() -> None:
    with pytest.raises(NoStage, match="relay decode: none is registered"):
        planner.pick_role(question(stage(Role.MAIN, "m0")), Role.RELAY, Limits())


def crossing_ms(sender: StageView, prompt_tokens: int = 160) -> float:
    main = stage(Role.MAIN, "m0")
    asked = replace(question(sender, main), prompt_tokens=prompt_tokens)
    return estimate.crossing(asked, sender, main, Limits(wan_delay_ms=0.0)).ms


def test_a_push_waits_only_for_those_that_have_less_left() -> None:
    size = 10 * BLOCK
    alone, behind_less, behind_more = (
        replace(IDLE, links=(LinkLoad("m0", size / 100, 9 * size, pushes),))
        for pushes in ((), (size // 2, size), (2 * size, 3 * size))
    )
    times = [crossing_ms(stage(Role.PREFILL, "p0", load)) for load in (alone, behind_less, behind_more)]
    assert times == pytest.approx([100e3, 250e3, 100e3])


def test_what_prefill_must_compute_crosses_only_once_its_computing_has_begun() -> None:
    size = 10 * BLOCK
    load = replace(IDLE, queued_tokens=2000, prefill_step_ms=40.0, links=(LinkLoad("m0", size / 1.0, 0, (size // 2,)),))
    sender = stage(Role.PREFILL, "p0", load)
    assert crossing_ms(sender) == pytest.approx(2040 + 1000)
    busy = replace(load, links=(LinkLoad("m0", size / 1.0, 0, (size,) * 3),))
    assert crossing_ms(stage(Role.PREFILL, "p0", busy)) == pytest.approx(3000 + 1000)


def test_what_prefill_holds_crosses_while_others_are_computed() -> None:
    size = 10 * BLOCK
    load = replace(IDLE, queued_tokens=2000, links=(LinkLoad("m0", size / 1.0, 0),))
    sender, main = stage(Role.PREFILL, "p0", load), stage(Role.MAIN, "m0")
    asked = replace(question(sender, main), prompt_tokens=160, hits={"p0": 128})
    crossing = estimate.crossing(asked, sender, main, Limits(wan_delay_ms=0.0))
    assert crossing.ms == pytest.approx(2000 + 200)


def test_a_push_asked_for_since_the_report_counts_on_its_own_link_only() -> None:
    size = 10 * BLOCK
    sender = replace(link(size / 100), sent_crossings=(("m0", size), ("m1", size), ("m0", 2 * size)))
    assert crossing_ms(sender) == pytest.approx(200e3)


def test_what_a_step_costs_whatever_is_in_it_is_paid_once_a_prompt() -> None:
    load = replace(IDLE, prefill_step_ms=40.0)
    sender = stage(Role.PREFILL, "p0", load)
    asked = replace(question(sender, stage(Role.MAIN, "m0")), prompt_tokens=160)
    assert estimate.prefill_ms(asked, sender, Limits()) == pytest.approx(40 + 160)
