"""Counts of steps and recent speeds. Knows durations, no sequence."""

_WEIGHT = 0.2
"""Of the newest step in a recent mean."""


class Meter:
    """Since the engine's start."""

    def __init__(self) -> None:
        self.steps = 0
        self.steps_overrun = 0
        self.preemptions = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.step_ms = 0.0
        self.prefill_tokens_per_s = 0.0

    def admitted(self, prompt_tokens: int, cached_tokens: int) -> None:
        """Counts a prompt and its hit."""
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += cached_tokens

    def ran(self, seconds: float, new_tokens: int, only_decodes: bool, overran: bool) -> None:
        """Counts a step that computed something."""
        self.steps += 1
        self.steps_overrun += overran
        if only_decodes:
            self.step_ms = _mean(self.step_ms, seconds * 1000)
        else:
            self.prefill_tokens_per_s = _mean(self.prefill_tokens_per_s, new_tokens / max(seconds, 1e-6))


def _mean(before: float, now: float) -> float:
    return now if before == 0 else before + _WEIGHT * (now - before)
