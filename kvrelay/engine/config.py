"""What an engine is told at start, and what it tells of its load. Knows no torch."""

from dataclasses import dataclass, field

from kvrelay.engine.pace import Pace


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes and limits of one engine."""

    pool_blocks: int
    """KV blocks in all."""
    max_running: int = 16
    """Sequences that may be admitted at once; one that has ended and is not closed yet only keeps its blocks."""
    max_waiting: int = 64
    """Sequences that may wait beyond max_running; then add() raises Overloaded."""
    token_budget: int = 256
    """New tokens a step computes at most; decode rows always fit."""
    max_model_tokens: int = 0
    """Prompt + output of one sequence; 0: as the model. Never more than the model or the pool allow."""
    prefix_cache: bool = True
    pack_tails: bool = True
    """A step's budget is shared by chunks of several sequences; False: one chunk a step (see bench.bathtub)."""
    pace: Pace = field(default_factory=Pace)


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """A snapshot between two steps."""

    running: int = 0
    """Admitted and not ended."""
    waiting: int = 0
    open: int = 0
    """Not closed: running, waiting, and ended ones that still keep blocks."""
    max_running: int = 0
    blocks_total: int = 0
    blocks_free: int = 0
    blocks_cached: int = 0
    """Cached and evictable."""
    queued_tokens: int = 0
    """Still to be computed by prefill, extend and recompute, of waiting sequences too."""
    prefill_tokens_per_s: float = 0.0
    """Recent, of steps with large chunks; 0 = nothing measured yet."""
    prefill_step_ms: float = 0.0
    """Recent: what a step with small chunks takes longer than that."""
    step_ms: float = 0.0
    """Recent mean of steps that only decode; 0 = nothing measured yet."""
    steps: int = 0
    steps_overrun: int = 0
    """Paced steps that took longer than their pace."""
    preemptions: int = 0
    """Sequences thrown back to be recomputed, since start."""
    prompt_tokens: int = 0
    """Of admitted sequences, since start."""
    cached_tokens: int = 0
    """Of these, found in the cache, since start."""
