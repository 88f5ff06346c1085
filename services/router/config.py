"""Every threshold of the router, each with its unit and reason. Knows no code that uses it."""

from typing import Literal

from pydantic import Field

from kvrelay.settings import ServiceSettings


class RouterSettings(ServiceSettings):
    """Settings of `python -m services.router`."""

    listen: str = "127.0.0.1:50050"
    """host:port to bind; port 0 takes a free one."""
    model: str = "smollm2"
    """Whose tokenizer to use; stages that serve another model or tokenizer are refused."""
    site: Literal["a", "b"] = "a"
    """Datacenter of the router, the prefill and the relay stages."""
    stages: list[str] = Field(default_factory=list)
    """host:port of stages; a DNS name stands for every address behind it. Redis adds more."""
    policy: Literal["pdd", "pd-local", "pd-remote"] = "pdd"
    """How to choose stages and pipeline; the pd-* ones are the baselines."""

    stall_ms: float = Field(200.0, ge=0)
    """KV may reach main decode this long after the first token before a relay is worth its place."""
    local_extend_tokens: int = Field(64, ge=0)
    """A main stage that lacks at most this many prompt tokens computes them itself: nothing crosses."""
    handoff_mode: Literal["dynamic", "one-shot", "catch-up"] = "dynamic"
    """How eager ids pass to main decode unless the request forces a mode."""
    handoff_tokens: int = Field(8, ge=1)
    """Outstanding ids that one decode step can absorb: catch-up ends at this many."""
    catch_up_tokens: int = Field(64, ge=1)
    """Dynamic mode catches up only if more ids than this are outstanding."""
    handoff_rounds: int = Field(4, ge=0)
    """Most catch-up rounds before the one-shot end."""
    relay_busy_free_ratio: float = Field(0.1, ge=0, le=1)
    """Dynamic mode hands over at once when the relay has a queue or fewer free slots than this share."""
    load_fresh_ms: float = Field(250.0, gt=0)
    """Dynamic mode believes a load report of at most this age."""
    relay_budget: int = Field(256, ge=1)
    """Output tokens a relay leg has room for; it pauses there."""
    turn_wait_s: float = Field(0.25, gt=0)
    """Main decode takes over right after a token of the relay, but waits no longer than this for one."""
    relay_ready_s: float = Field(5.0, gt=0)
    """A relay leg that has no KV this long after the first token is replaced."""
    rejoin_wait_s: float = Field(10.0, ge=0)
    """How long a relay that has used up its budget waits for a main stage to come back."""

    singular_margin: float = Field(2.0, ge=1)
    """p-rld without a main leg only if max_tokens x ITL x this is less than the crossing time."""
    singular_cut_s: float = Field(1.0, gt=0)
    """When the answer ended early and the rest of the KV needs the link longer than this, the push is cut."""
    drain_s: float = Field(60.0, gt=0)
    """How long main decode may take KV and ids of an answer whose client has gone home."""
    max_draining: int = Field(64, ge=0)
    """Requests in the drain group at most; beyond it the oldest way out is taken: the push is cut."""

    lookup_timeout_ms: float = Field(20.0, gt=0)
    """Longest wait for the prefix index; then remembered hits are used, marked degraded."""
    remembered_blocks: int = Field(65_536, ge=1)
    """Block hashes the router remembers of what it routed, for each stage."""

    max_in_flight: int = Field(256, ge=1)
    """Requests served at once."""
    max_queued: int = Field(64, ge=0)
    """Requests that wait for a place; beyond it RESOURCE_EXHAUSTED."""
    retry_after_s: float = Field(1.0, gt=0)
    """Retry hint of a refusal."""
    max_attempts: int = Field(3, ge=1)
    """Plans tried until a first token, and feeds of each leg after it."""
    client_backlog_tokens: int = Field(4096, ge=1)
    """Tokens a slow client may be behind before the router stops reading the stages."""
    long_prompt_chars: int = Field(4096, ge=0)
    """Text longer than this is tokenized in a thread."""
    max_prompt_chars: int = Field(2_000_000, ge=1)
    """Longer text is refused before tokenization."""

    wan_rate_bytes_per_s: float = Field(125e6, gt=0)
    """Goodput between sites until a stage has measured it."""
    wan_delay_ms: float = Field(10.0, ge=0)
    """One-way delay between sites."""
    lan_rate_bytes_per_s: float = Field(1e9, gt=0)
    """Goodput inside a site until a stage has measured it."""
    lan_delay_ms: float = Field(0.5, ge=0)
    """One-way delay inside a site."""
    prefill_tokens_per_s: float = Field(2000.0, gt=0)
    """Speed of a prefill stage until it has measured it."""
    itl_ms: float = Field(30.0, gt=0)
    """Decode step of a stage until it has measured it."""
    load_penalty_tokens: int = Field(64, ge=0)
    """A running sequence makes a stage as unattractive as this many missing tokens; a waiting one, four times."""

    dial_timeout_s: float = Field(5.0, gt=0)
    """Longest wait for Describe."""
    redial_min_s: float = Field(0.2, gt=0)
    """First pause before a stage is dialled again; doubles up to redial_max_s."""
    redial_max_s: float = Field(5.0, gt=0)
    """Longest pause before a stage is dialled again."""
    resolve_interval_s: float = Field(2.0, gt=0)
    """How often DNS names and Redis are asked for stages."""
    load_silence_s: float = Field(5.0, ge=2)
    """A stage whose load reports stop for this long is not chosen."""
    stop_grace_s: float = Field(2.0, gt=0)
    """How long a relay may take to answer Stop before its stream is cut."""
