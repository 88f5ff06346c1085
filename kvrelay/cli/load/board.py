"""What is shown while a run lasts. Knows what rich draws; an event costs it some counting, and draws nothing."""

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from kvrelay.cli.console import err
from kvrelay.load.run import Progress as RunProgress

WINDOW_S = 5.0
"""That the rate is of."""
DRAWN_S = 0.1
"""Between two pictures on a terminal; only they compute percentiles."""
LINES_S = 10.0
"""Between two lines, in a file or a pipe."""


@contextlib.contextmanager
def progress(total: int, console: Console = err) -> Iterator["Board"]:
    """Until the end of the block: a line that lives, or, where there is no terminal, a line now and then.

    total: requests; 0: not known.
    """
    if not console.is_terminal:
        yield Board(lambda line: console.print(f"[dim]{line}[/dim]", soft_wrap=True), total=total)
        return
    board = Board(total=total)
    columns = (TextColumn("requests"), BarColumn(16), _Done(board), TimeElapsedColumn(), _Line(board))
    with Progress(*columns, console=console, refresh_per_second=1 / DRAWN_S) as shown:
        task = shown.add_task("", total=total or None)
        try:
            yield board
        finally:
            shown.update(task, completed=board.done)


class _Done(MofNCompleteColumn):
    """How many have ended; the bar goes with it."""

    def __init__(self, board: "Board") -> None:
        super().__init__()
        self._board = board

    def render(self, task: Task) -> Text:
        """See ProgressColumn."""
        task.completed = self._board.done
        return super().render(task)


class _Line(ProgressColumn):
    """The board's line."""

    def __init__(self, board: "Board") -> None:
        super().__init__()
        self._board = board

    def render(self, task: Task) -> Text:
        """See ProgressColumn."""
        return Text(self._board.line())


class Board:
    """Requests ended, running, failed, the rate of late, TTFT so far. Told in one thread, read in any."""

    def __init__(
        self,
        tell: Callable[[str], None] | None = None,
        *,
        total: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """tell: gets a line every LINES_S, as requests begin and end."""
        self.done = 0
        self._tell, self._total, self._clock = tell, total, clock
        self._began_s: float | None = None
        self._told_s = 0.0
        self._ended_s: deque[float] = deque()
        self._ttft = Quantiles()
        self._running = 0
        self._failed = 0

    def __call__(self, progress: RunProgress) -> None:
        """One more request was sent, or has ended."""
        now = self._clock()
        if self._began_s is None:
            self._began_s = self._told_s = now
        self._running = progress.running
        if (record := progress.record) is not None:
            self.done += 1
            self._ended_s.append(now)
            self._failed += record.outcome == "failed"
            if record.ttft_ms is not None:
                self._ttft.add(record.ttft_ms)
        while self._ended_s and self._ended_s[0] <= now - WINDOW_S:
            self._ended_s.popleft()
        if self._tell is not None and now >= self._told_s + LINES_S:
            self._told_s = now
            self._tell(f"{self.done}{f' of {self._total}' if self._total else ''} requests, {self.line()}")

    def line(self) -> str:
        """ "3.2/s, 4 running, TTFT p50 81, p90 240 ms, 0 failed"."""
        if self._began_s is None:
            return "warming up"
        parts = [f"{self.rate_per_s:.1f}/s, {self._running} running"]
        if self._ttft.count:
            parts.append(f"TTFT p50 {self._ttft.at(0.5):,.0f}, p90 {self._ttft.at(0.9):,.0f} ms")
        return ", ".join([*parts, f"{self._failed} failed"])

    @property
    def rate_per_s(self) -> float:
        """Of requests that ended within WINDOW_S."""
        if self._began_s is None:
            return 0.0
        now = self._clock()
        late = sum(at_s > now - WINDOW_S for at_s in self._ended_s.copy())
        return late / min(WINDOW_S, max(DRAWN_S, now - self._began_s))


class Quantiles:
    """Of any number of positive values, in a fixed room, to within 1 %: counts in buckets of equal ratio."""

    LEAST, PER_E, BUCKETS = 0.1, 50, 900
    """From LEAST to LEAST × e^(BUCKETS ÷ PER_E); what lies outside counts as that."""

    def __init__(self) -> None:
        self.count = 0
        self._buckets = [0] * self.BUCKETS

    def add(self, value: float) -> None:
        """One more."""
        place = int(math.log(max(value, self.LEAST) / self.LEAST) * self.PER_E)
        self._buckets[min(place, self.BUCKETS - 1)] += 1
        self.count += 1

    def at(self, share: float) -> float:
        """The value that `share` of them do not exceed; 0 without values."""
        wanted, seen = share * self.count, 0
        for place, count in enumerate(self._buckets):
            seen += count
            if count and seen >= wanted:
                return self.LEAST * math.exp((place + 0.5) / self.PER_E)
        return 0.0
