"""A trace as a workload: which rows, at what scale, and the ids that stand for their text. Reads the file once."""

import enum
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from kvrelay.load.ids import dice, draw_ids
from kvrelay.load.traces import mooncake, tables
from kvrelay.load.traces.row import Row
from kvrelay.load.workload import Conversation, Turn


class TraceFormat(enum.StrEnum):
    """Of which publication."""

    MOONCAKE = "mooncake"
    AZURE = "azure"
    BURSTGPT = "burstgpt"
    SPLITWISE = "splitwise"


READERS: dict[TraceFormat, Callable[[Iterable[str], object], Iterator[Row]]] = {
    TraceFormat.MOONCAKE: mooncake.read,
    TraceFormat.AZURE: lambda lines, path: tables.read(lines, path, [tables.AZURE]),
    TraceFormat.BURSTGPT: lambda lines, path: tables.read(lines, path, [tables.BURSTGPT]),
    TraceFormat.SPLITWISE: lambda lines, path: tables.read(lines, path, tables.SPLITWISE),
}


@dataclass(frozen=True, slots=True)
class Cut:
    """Which part of a trace, and its scale."""

    start_s: float = 0.0
    """Since its first row."""
    end_s: float | None = None
    limit: int | None = None
    """Rows at most."""
    time_scale: float = 1.0
    """Times are multiplied by this: 0.5 = twice as fast."""
    length_scale: float = 1.0
    """Lengths are multiplied by this."""
    most_tokens: int | None = None
    """Rows whose scaled prompt and output need more are left out: no stage could hold them."""


def load_rows(path: Path, kind: TraceFormat, cut: Cut) -> tuple[list[Row], int]:
    """The rows, by time from 0 and scaled in time, lengths as in the file; and how many were too long.

    Rows of one moment keep the file's order. TraceError: a line is malformed. OSError: there is no such file.
    """
    with path.open(newline="", errors="replace") as lines:
        rows = sorted(READERS[kind](lines, path), key=lambda row: row.at_s)
    origin_s = rows[0].at_s if rows else 0.0
    end_s = float("inf") if cut.end_s is None else cut.end_s
    part = [row for row in rows if cut.start_s <= row.at_s - origin_s < end_s]
    fitting = [row for row in part if cut.most_tokens is None or sum(scaled(row, cut)) <= cut.most_tokens]
    zero_s = origin_s + cut.start_s
    kept = [
        Row((row.at_s - zero_s) * cut.time_scale, row.prompt_tokens, row.output_tokens, row.hash_ids, row.line)
        for row in fitting[: cut.limit]
    ]
    return kept, len(part) - len(fitting)


def scaled(row: Row, cut: Cut) -> tuple[int, int]:
    """Prompt and output tokens at the cut's scale; at least one of each."""
    prompt, output = (max(1, round(n * cut.length_scale)) for n in (row.prompt_tokens, row.output_tokens))
    return prompt, output


@dataclass(frozen=True, slots=True)
class Replay:
    """A conversation of one turn per row. Rows with hash ids share tokens where they share ids; others share none."""

    rows: tuple[Row, ...]
    cut: Cut
    seed: int
    vocab_size: int

    def warm_up(self) -> Sequence[Conversation]:
        """None: a trace warms the caches as it did in its day."""
        return []

    def conversations(self) -> Iterator[Conversation]:
        """In order of time."""
        for number, row in enumerate(self.rows):
            output = scaled(row, self.cut)[1]
            turn = Turn(self.prompt_ids(row), output, int(dice(self.seed, "turn", number).integers(2**32)))
            yield Conversation(f"line-{row.line}", (), (turn,), row.at_s)

    def prompt_ids(self, row: Row) -> tuple[int, ...]:
        """The ids that stand for a row's prompt."""
        length = scaled(row, self.cut)[0]
        if not row.hash_ids:
            return draw_ids(dice(self.seed, "line", row.line), length, self.vocab_size)
        block = mooncake.BLOCK_TOKENS * self.cut.length_scale
        edges = [round(block * number) for number in range(len(row.hash_ids) + 1)]
        edges[-1] = length  # the last block is as full as the prompt makes it
        ids: list[int] = []
        for block_id, first, end in zip(row.hash_ids, edges, edges[1:], strict=False):
            ids += block_ids(block_id, self.seed, self.vocab_size, _whole(block))[: max(0, end - first)]
        return tuple(ids)


def _whole(block: float) -> int:
    return int(block) + 2


@lru_cache(maxsize=8192)
def block_ids(block_id: int, seed: int, vocab_size: int, count: int) -> tuple[int, ...]:
    """The first `count` tokens of a hashed block."""
    return draw_ids(dice(seed, "block", block_id), count, vocab_size)
