"""Counts of steps and recent speeds. Knows durations, no sequence."""

_WEIGHT = 0.2
"""Of the newest step in a recent mean."""
_LARGE = 0.5
"""Of the most new tokens a step has had: one with more tells how fast chunks are, one with fewer what a step costs."""


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
        self.prefill_step_ms = 0.0
        self._most_tokens = 0

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
            self._chunks(max(seconds, 1e-6), new_tokens)

    def _chunks(self, seconds: float, new_tokens: int) -> None:
        """Small steps would make large prompts seem slow, and large ones small prompts quick: they count apart."""
        if new_tokens >= self._most_tokens * _LARGE:
            if new_tokens * _LARGE > self._most_tokens:
                self.prefill_tokens_per_s = 0.0
            self.prefill_tokens_per_s = _mean(self.prefill_tokens_per_s, new_tokens / seconds)
            self._most_tokens = max(self._most_tokens, new_tokens)
        else:
            rest_ms = 1000 * (seconds - new_tokens / self.prefill_tokens_per_s)
            self.prefill_step_ms = _mean(self.prefill_step_ms, max(0.0, rest_ms))


def _mean(before: float, now: float) -> float:
    return now if before == 0 else before + _WEIGHT * (now - before)
