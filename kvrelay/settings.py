"""The only reader of the environment: KVRELAY_* variables and command-line flags become frozen settings objects."""

import os
from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class ProgramSettings(BaseSettings):
    """What every program of the suite has."""

    model_config = SettingsConfigDict(
        env_prefix="KVRELAY_",
        frozen=True,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
        extra="forbid",
        use_attribute_docstrings=True,
    )

    listen: str = "127.0.0.1:0"
    """host:port to bind; port 0 takes a free one."""
    log_level: str = "info"
    """debug, info, warning or error."""
    log_format: Literal["text", "json"] = "text"
    """One line of text, or one JSON object, an event."""
    shutdown_grace_s: float = Field(5.0, ge=0)
    """How long running requests may go on after a stop signal."""


class ServiceSettings(ProgramSettings):
    """What the four services have in common."""

    metrics_listen: str = ""
    """host:port of the Prometheus text endpoint; empty: none."""
    redis_url: str = ""
    """redis://host:port/db of the prefix index; empty: none."""


class StageSettings(ServiceSettings):
    """What prefill, relay decode and main decode have in common."""

    instance_id: str = ""
    """Short and unique in the fleet; empty: made from role and epoch."""
    site: Literal["a", "b"] = "a"
    """Datacenter; a WAN lies between the two."""
    advertise: str = ""
    """host:port that others dial; empty: the bound address."""
    advertise_via: str = ""
    """Admin address of a WAN emulator: ask it for a port to this stage and advertise that."""
    bulk_listen: str = ""
    """host:port of a decode stage for bulk KV connections, port 0 a free one; empty: KV comes over gRPC only."""
    bulk_advertise: str = ""
    """host:port by which senders reach it; empty: the bound address, through `advertise_via` if that is set."""
    model: str = "smollm2"
    """smollm2 (packaged), tiny (deterministic, for tests), a Hugging Face directory, or a .gguf file."""
    device: str = "cpu"
    """cpu or cuda."""
    dtype: Literal["", "float32", "float64", "bfloat16", "float16", "int8"] = ""
    """Empty: float32 on the CPU, bfloat16 on cuda, float64 for tiny. int8: the weights, on a CPU, all else float32."""
    threads: int = Field(0, ge=0)
    """torch threads; 0: torch's own choice."""
    cache_dir: str = ""
    """Folder of compiled kernels and converted weights; empty: kvrelay/ in the user's cache (XDG_CACHE_HOME)."""
    block_tokens: int = Field(16, ge=1, le=256)
    """Tokens of a KV block; all stages must agree."""
    pool_tokens: int = Field(16384, ge=1)
    """Room of the KV pool, in tokens."""
    max_model_tokens: int = Field(0, ge=0)
    """Prompt + output of one request; 0: the model's context length, at most the pool."""
    max_running: int = Field(16, ge=1)
    """Sequences that may hold KV at once."""
    max_waiting: int = Field(64, ge=0)
    """Sequences that may wait for admission; beyond it RESOURCE_EXHAUSTED."""
    token_budget: int = Field(256, ge=1)
    """New tokens a step computes at most."""
    prefix_cache: bool = True
    """Keep KV of ended requests for later ones that begin alike."""
    pace: str = ""
    """Emulated accelerator: "fixed=MS,token=MS,context=MS,sequence=MS"; empty: as fast as this machine is."""
    offer_wait_s: float = Field(10.0, gt=0)
    """How long an Offer without its decode stream is parked."""
    report_interval_s: float = Field(0.1, gt=0)
    """Longest time between two load reports; an idle stage that has nothing new to say needs only one a second."""
    heartbeat_s: float = Field(2.0, gt=0)
    """The instance key in Redis lives three of these."""


def cache_home() -> Path:
    """The user's folder for what can be made again: $XDG_CACHE_HOME, else ~/.cache."""
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    return Path(chosen) if chosen.startswith("/") else Path(os.path.expanduser("~")) / ".cache"
