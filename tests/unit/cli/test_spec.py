"""Command lines follow from the topology alone."""

import itertools

from kvrelay.cli.spec import Addresses, ClusterSpec, StageSpec, flags, router_argv, stage_argv, wan_argv
from kvrelay.types import Role

AT = Addresses("h:1", "h:2", "h:3", {"prefill-1": "h:4", "main-1": "h:5", "main-local-1": "h:6"})


def test_stages_have_unique_names_and_the_site_of_their_kind() -> None:
    stages = ClusterSpec(prefill=2, relay=1, main=2, main_local=1).stages()
    assert [stage.name for stage in stages] == [
        "prefill-1",
        "prefill-2",
        "relay-1",
        "main-1",
        "main-2",
        "main-local-1",
    ]
    assert [stage.site for stage in stages] == ["a", "a", "a", "b", "b", "a"]


def test_only_site_b_goes_through_the_emulator() -> None:
    for role, site in itertools.product(Role, "ab"):
        argv = stage_argv(ClusterSpec(), StageSpec("main-1", role, site), AT, "redis://h:9/0")
        assert ("--advertise-via=h:3" in argv) == (site == "b")
        assert "--redis-url=redis://h:9/0" in argv


def test_stages_that_receive_kv_take_bulk_connections_unless_told_otherwise() -> None:
    for role in Role:
        argv = stage_argv(ClusterSpec(), StageSpec("main-1", role, "a"), AT, "")
        assert ("--bulk-listen=127.0.0.1:0" in argv) == (role is not Role.PREFILL)
    without = ClusterSpec(stage_set=(("bulk_listen", ""),))
    assert not any("bulk" in part for part in stage_argv(without, StageSpec("main-1", Role.MAIN, "b"), AT, ""))


def test_a_setting_of_one_role_wins_over_that_of_all() -> None:
    spec = ClusterSpec(stage_set=(("max_running", "4"), ("relay.max_running", "9")))
    relay = stage_argv(spec, StageSpec("prefill-1", Role.RELAY, "a"), AT, "")
    main = stage_argv(spec, StageSpec("main-1", Role.MAIN, "b"), AT, "")
    assert "--max-running=9" in relay
    assert "--max-running=4" in main


def test_the_router_dials_what_site_a_reaches() -> None:
    argv = router_argv(ClusterSpec(router_set=(("stall_ms", "5"),)), AT, {"prefill-1": "h:4", "main-1": "h:70"})
    assert "--stages=h:4,h:70" in argv
    assert "--stall-ms=5" in argv


def test_the_router_knows_the_emulated_link_before_it_has_measured_it() -> None:
    argv = router_argv(ClusterSpec(wan_rate="80mbit", wan_delay_ms=7), AT, {})
    assert "--wan-rate-bytes-per-s=10000000.0" in argv
    assert "--wan-delay-ms=7" in argv
    unlimited = router_argv(ClusterSpec(wan_rate="0"), AT, {})
    assert not any(flag.startswith("--wan-rate") for flag in unlimited)


def test_empty_settings_are_left_to_the_program() -> None:
    assert flags({"pace": "", "pool_tokens": 5}) == ["--pool-tokens=5"]
    assert "--rate=100mbit" in wan_argv(ClusterSpec(), AT)
