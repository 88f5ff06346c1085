"""The WAN emulator's settings, and the texts in which rates and port ranges are written. Opens nothing."""

import re

from pydantic import Field, field_validator

from kvrelay.settings import ProgramSettings

_UNITS = {"": 1.0, "b": 1.0}
_UNITS |= {f"{prefix}b": 1000.0**power for power, prefix in enumerate(("k", "m", "g"), start=1)}
_UNITS |= {f"{prefix}bit": 1000.0**power / 8 for power, prefix in enumerate(("", "k", "m", "g"))}


def parse_rate(text: str) -> float:
    """Bytes a second of "100mbit", "12.5MB", "1gbit" or a plain number of bytes; 0 = unlimited.

    ValueError for anything else.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*?)(?:/s)?\s*", text.lower())
    if found is None or found[2] not in _UNITS:
        raise ValueError(f"{text!r} is not a rate such as 100mbit, 12.5MB or a number of bytes a second")
    return float(found[1]) * _UNITS[found[2]]


def parse_ports(text: str) -> range | None:
    """The ports of "7000-7099", both ends included; None of "0": any free ones. ValueError for anything else."""
    if text.strip() in ("", "0"):
        return None
    first, dash, last = text.partition("-")
    if not first.strip().isdecimal() or (dash and not last.strip().isdecimal()):
        raise ValueError(f"{text!r} is not a range of ports such as 7000-7099, nor 0")
    ports = range(int(first), int(last or first) + 1)
    if not ports or ports.start < 1 or ports.stop > 65536:
        raise ValueError(f"{text!r}: ports are 1-65535, the first not above the last")
    return ports


def parse_mapping(text: str) -> tuple[str, str]:
    """("host:port", "a" or "b") of "host:port@a": a target and its site. ValueError for anything else."""
    target, at, site = text.rpartition("@")
    if not at or site not in ("a", "b") or not target.rpartition(":")[2].isdecimal():
        raise ValueError(f"{text!r} is not a mapping such as redis:6379@a")
    return target, site


class WanSettings(ProgramSettings):
    """Of `python -m kvrelay.wan`. `listen` is the admin service's address."""

    host: str = ""
    """Where mapped ports are bound; empty: the host of `listen`."""
    ports: str = "0"
    """Range of ports for mappings, taken in order ("7000-7099"); 0: any free ones."""
    advertise_host_a: str = ""
    """By which callers at site A reach the mapped ports; empty: `host`, or 127.0.0.1 if that is a wildcard."""
    advertise_host_b: str = ""
    """The same for callers at site B."""
    rate: str = "0"
    """Of each direction: "100mbit", "12.5MB", bytes a second; 0: unlimited."""
    rate_b_to_a: str = ""
    """Of the direction B to A, if it differs."""
    delay_ms: float = Field(0.0, ge=0, le=60_000)
    """One way, each direction."""
    delay_ms_b_to_a: float | None = Field(None, ge=0, le=60_000)
    """Of the direction B to A, if it differs."""
    jitter_ms: float = Field(0.0, ge=0, le=60_000)
    """Uniform in [0, jitter), added to the delay; order within a connection is kept."""
    connection_rate: str = "0"
    """Cap of each connection, in each direction; 0: none."""
    map: list[str] = Field(default_factory=list)
    """Mappings from the start: "host:port@site", where `site` is the target's."""

    @field_validator("rate", "rate_b_to_a", "connection_rate")
    @classmethod
    def _is_rate(cls, text: str) -> str:
        parse_rate(text or "0")
        return text

    @field_validator("ports")
    @classmethod
    def _is_ports(cls, text: str) -> str:
        parse_ports(text)
        return text

    @field_validator("map")
    @classmethod
    def _are_mappings(cls, texts: list[str]) -> list[str]:
        for text in texts:
            parse_mapping(text)
        return texts
