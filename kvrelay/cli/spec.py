"""What `kvrelay up` starts: the topology, and each program's command line. Pure: starts nothing, binds nothing."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvrelay.types import Role
from kvrelay.wan.settings import parse_rate

LOOPBACK = "127.0.0.1"
"""Where all but the router is bound: only the router is for others."""
REDIAL_S = 0.5
"""The router starts with its stages and dials them until they are there: not at ever longer intervals, on one host."""
MODULES = {Role.PREFILL: "services.prefill", Role.RELAY: "services.relay_decode", Role.MAIN: "services.main_decode"}


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """Two datacenters on one host."""

    model: str = "smollm2"
    prefill: int = 1
    relay: int = 1
    main: int = 1
    """Main stages at site B."""
    main_local: int = 0
    """Main stages at site A, for the pd-local baseline."""
    wan_rate: str = "100mbit"
    """Of each direction, in the WAN emulator's notation."""
    wan_delay_ms: float = 20.0
    """One way."""
    wan_jitter_ms: float = 0.0
    policy: str = "pdd"
    device: str = "cpu"
    dtype: str = ""
    pace: str = ""
    pool_tokens: int = 16384
    threads: int = 1
    """torch threads of each stage; 0: torch's own choice."""
    router_set: tuple[tuple[str, str], ...] = ()
    """More settings of the router: (key, value)."""
    stage_set: tuple[tuple[str, str], ...] = ()
    """More settings of stages: (key or role.key, value)."""
    host: str = LOOPBACK
    """Where the router is bound."""
    router_port: int = 50050
    """0: any free one."""
    log_dir: Path = Path("kvrelay-logs")
    grace_s: float = 8.0
    """From SIGTERM to SIGKILL."""
    ready_s: float = 180.0
    """How long the whole start may take."""
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether a request can be served; else the router waits, alive but not ready, for stages from elsewhere."""
        return self.prefill > 0 and self.main + self.main_local > 0

    def stages(self) -> list["StageSpec"]:
        """All stages in start order, with names that are unique."""
        counts = [(Role.PREFILL, "a", "prefill", self.prefill), (Role.RELAY, "a", "relay", self.relay)]
        counts += [(Role.MAIN, "b", "main", self.main), (Role.MAIN, "a", "main-local", self.main_local)]
        return [StageSpec(f"{name}-{i}", role, site) for role, site, name, count in counts for i in range(1, count + 1)]


@dataclass(frozen=True, slots=True)
class StageSpec:
    """One stage of the topology."""

    name: str
    role: Role
    site: str


@dataclass(frozen=True, slots=True)
class Addresses:
    """host:port of everything, as chosen for one cluster."""

    router: str
    redis: str
    wan: str
    stages: Mapping[str, str]
    """By name: where the stage binds."""


def flags(settings: Mapping[str, object]) -> list[str]:
    """{"pool_tokens": 4096, "prefix_cache": "false"} -> ["--pool-tokens=4096", "--no-prefix-cache"]; "" is left out."""
    return [_flag(key.replace("_", "-"), value) for key, value in settings.items() if value != ""]


def _flag(name: str, value: object) -> str:
    if str(value).lower() in ("true", "false"):  # a switch takes no value
        return f"--{name}" if str(value).lower() == "true" else f"--no-{name}"
    return f"--{name}={value}"


def redis_argv(program: Path, host: str, port: int) -> list[str]:
    """A Redis for the prefix index: nothing on disk (stages announce again what they hold), nothing evicted."""
    settings = {
        "bind": host,
        "port": str(port),
        "protected-mode": "yes" if host == LOOPBACK else "no",
        "save": "",
        "appendonly": "no",
        "maxmemory-policy": "noeviction",
    }
    return [str(program), *(part for name, value in settings.items() for part in (f"--{name}", value))]


def wan_argv(spec: ClusterSpec, at: Addresses) -> list[str]:
    """The WAN emulator."""
    wanted = {"listen": at.wan, "rate": spec.wan_rate, "delay_ms": spec.wan_delay_ms, "jitter_ms": spec.wan_jitter_ms}
    return [sys.executable, "-m", "kvrelay.wan", *flags(wanted)]


def stage_argv(spec: ClusterSpec, stage: StageSpec, at: Addresses, redis_url: str) -> list[str]:
    """A stage. At site B it advertises itself through the WAN emulator, and `redis_url` must lead through it too."""
    wanted: dict[str, object] = {
        "listen": at.stages[stage.name],
        "instance_id": stage.name,
        "site": stage.site,
        "advertise_via": at.wan if stage.site == "b" else "",
        "bulk_listen": "" if stage.role is Role.PREFILL else f"{LOOPBACK}:0",
        "redis_url": redis_url,
        "model": spec.model,
        "device": spec.device,
        "dtype": spec.dtype,
        "threads": spec.threads,
        "pool_tokens": spec.pool_tokens,
        "pace": spec.pace,
    }
    wanted.update(extra_of(stage.role, spec.stage_set))
    return [sys.executable, "-m", MODULES[stage.role], *flags(wanted)]


def extra_of(role: Role, extra: tuple[tuple[str, str], ...]) -> dict[str, str]:
    """The settings that concern a role; "relay.max_running" concerns relay stages only and wins over "max_running"."""
    every = {key: value for key, value in extra if "." not in key}
    own = {key.split(".", 1)[1]: value for key, value in extra if key.startswith(f"{role}.")}
    return every | own


def router_argv(spec: ClusterSpec, at: Addresses, reach: Mapping[str, str]) -> list[str]:
    """The router. `reach`: stage name -> address as dialled from site A.

    The router is told the emulated link's rate, so that its first plans are right.
    """
    wanted: dict[str, object] = {
        "listen": at.router,
        "redis_url": f"redis://{at.redis}/0",
        "model": spec.model,
        "policy": spec.policy,
        "stages": ",".join(reach.values()),
        "wan_rate_bytes_per_s": parse_rate(spec.wan_rate) or "",
        "wan_delay_ms": spec.wan_delay_ms,
        "redial_max_s": REDIAL_S,
    }
    wanted.update(spec.router_set)
    return [sys.executable, "-m", "services.router", *flags(wanted)]
