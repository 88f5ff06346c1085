"""The progress line of a run. Knows what rich draws."""

import contextlib
import time
from collections import deque
from collections.abc import Iterator

import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvrelay.cli.console import err
from kvrelay.load.run import Progress as RunProgress

WINDOW_S = 5.0


@contextlib.contextmanager
def progress(total: int) -> Iterator["Board"]:
    """A line until the end of the block. total: 0: not known."""
    bar = (TextColumn("requests"), BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*bar, TextColumn("{task.description}"), console=err) as shown:
        yield Board(shown, total)


class Board:
    """Requests ended, running, the rate of late, TTFT so far, failures."""

    def __init__(self, shown: Progress, total: int) -> None:
        self._shown = shown
        self._task = shown.add_task("warming up", total=total or None)
        self._ended: deque[float] = deque()
        self._ttft_ms: list[float] = []
        self._failed = 0

    def __call__(self, progress: RunProgress) -> None:
        """One more request was sent, or has ended."""
        now = time.monotonic()
        if (record := progress.record) is not None:
            self._ended.append(now)
            self._failed += record.outcome == "failed"
            self._ttft_ms += [record.ttft_ms] if record.ttft_ms is not None else []
            self._shown.update(self._task, advance=1)
        while self._ended and self._ended[0] < now - WINDOW_S:
            self._ended.popleft()
        self._shown.update(self._task, description=self.line(progress.running))

    def line(self, running: int) -> str:
        """ "3.2/s, 4 running, TTFT p50 81, p90 240 ms, 0 failed"."""
        span_s = max(1e-3, time.monotonic() - self._ended[0]) if len(self._ended) > 1 else WINDOW_S
        recent = self._ttft_ms[-1000:]
        p50, p90 = np.percentile(recent, [50, 90]) if recent else (0.0, 0.0)
        rate = len(self._ended) / span_s
        return f"{rate:.1f}/s, {running} running, TTFT p50 {p50:,.0f}, p90 {p90:,.0f} ms, {self._failed} failed"
