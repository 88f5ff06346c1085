"""One request of a trace, whatever its format, and how a bad line is named. Knows no file."""

from dataclasses import dataclass

from kvrelay.errors import KvrelayError


class TraceError(KvrelayError):
    """A trace cannot be read; the message names file and line."""

    def __init__(self, path: object, line: int, problem: str) -> None:
        super().__init__(f"{path}:{line}: {problem}")
        self.line = line


@dataclass(frozen=True, slots=True)
class Row:
    """What a line says."""

    at_s: float
    """By the trace's clock."""
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    """Of the prompt's blocks of 512 tokens: equal ids mean equal tokens; empty: the format does not say."""
    line: int = 0
