"""Rates, ports, mappings and flags are read as people write them, and refused with what is wrong."""

import pytest
from pydantic import ValidationError
from pydantic_settings import CliApp

from kvrelay.wan.settings import WanSettings, parse_mapping, parse_ports, parse_rate


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("0", 0.0),
        ("12500000", 12.5e6),
        ("100mbit", 12.5e6),
        ("1.5 Gbit/s", 187.5e6),
        ("12.5MB", 12.5e6),
        ("8kB/s", 8000.0),
        ("800bit", 100.0),
    ],
)
def test_rates_are_bytes_a_second(text: str, rate: float) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["", "fast", "-1", "10 parsec", "nan", "1e9", "10mibit"])
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a rate"):
        parse_rate(text)


def test_port_ranges_include_both_ends() -> None:
    assert parse_ports("0") is None
    assert parse_ports("7000-7099") == range(7000, 7100)
    assert parse_ports("7000") == range(7000, 7001)


@pytest.mark.parametrize("text", ["7099-7000", "0-10", "65530-65536", "a-b", "7000-"])
def test_what_is_no_port_range_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="ports|range"):
        parse_ports(text)


def test_mappings_name_a_target_and_its_site() -> None:
    assert parse_mapping("redis:6379@a") == ("redis:6379", "a")
    for text in ("redis:6379", "redis@a", "redis:6379@c", ""):
        with pytest.raises(ValueError, match="is not a mapping"):
            parse_mapping(text)


def test_flags_become_settings() -> None:
    flags = ["--listen=0.0.0.0:50090", "--ports=7000-7099", "--map=redis:6379@a", "--map=x:1@b", "--rate=100mbit"]
    settings = CliApp.run(WanSettings, cli_args=[*flags, "--delay-ms=20", "--advertise-host-a=wan"])
    assert settings.map == ["redis:6379@a", "x:1@b"]
    assert (settings.rate, settings.delay_ms, settings.advertise_host_a) == ("100mbit", 20.0, "wan")


@pytest.mark.parametrize(
    ("field", "value"), [("rate", "fast"), ("ports", "9-1"), ("map", ["x"]), ("delay_ms", -1), ("jitter_ms", 1e9)]
)
def test_a_bad_setting_is_named(field: str, value: object) -> None:
    with pytest.raises(ValidationError, match=field):
        WanSettings(**{field: value})  # type: ignore[arg-type]
