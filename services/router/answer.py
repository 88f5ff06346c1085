"""What the user has been promised so far: accepted ids, their text, how the answer ended. Pure; no stage, no I/O."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvrelay.errors import StageFailed
from kvrelay.types import FinishReason, Logprobs, Sampling, Source, TokenRun


class Delta(Protocol):
    """What TextStream.push returns."""

    @property
    def text(self) -> str: ...
    @property
    def tokens(self) -> int: ...
    @property
    def stop(self) -> str | None: ...


class Text(Protocol):
    """The part of kvrelay.text.stream.TextStream that an answer uses."""

    def push(self, ids: Sequence[int]) -> Delta: ...
    def finish(self) -> str: ...


@dataclass(slots=True)
class Piece:
    """Accepted tokens of one source that the client has not been sent yet."""

    first_index: int
    source: Source
    ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    text: str = ""


class Answer:
    """One request's output. `take` is the only way in; it refuses gaps and cuts at the end of the answer."""

    def __init__(self, sampling: Sampling, eos_token_ids: Sequence[int], text: Text | None) -> None:
        self._sampling = sampling
        self._eos = frozenset() if sampling.ignore_eos else frozenset(eos_token_ids)
        self._stop_ids = frozenset(sampling.stop_token_ids)
        self._ends = self._eos | self._stop_ids
        self._text = text
        self._pieces: list[Piece] = []
        self.ids: list[int] = []
        """Accepted, by absolute index."""
        self.unread = 0
        """Tokens that the client has not been sent yet."""
        self.by_source = dict.fromkeys(Source, 0)
        self.last_source: Source | None = None
        self.reason: FinishReason | None = None
        self.stop_string = ""
        self.last_text = ""
        """Text held back until the end."""

    @property
    def count(self) -> int:
        """Accepted tokens; also the next absolute index."""
        return len(self.ids)

    @property
    def finished(self) -> bool:
        """Whether no token may follow."""
        return self.reason is not None

    def take(self, run: TokenRun, source: Source) -> int:
        """Accepts a run at the next index; -> how many of its tokens count. Raises StageFailed at a gap or a repeat."""
        if run.first_index != len(self.ids):
            raise StageFailed(f"{source} decode sent token {run.first_index} where {self.count} was next")
        if self.reason is not None or not run.ids:
            return 0
        ids, reason = self._cut_at_end(run.ids)
        text = ""
        if self._text is not None:
            delta = self._text.push(ids)
            text = delta.text
            if delta.stop is not None:
                ids, reason, self.stop_string = ids[: delta.tokens], FinishReason.STOP_STRING, delta.stop
        self._keep(run, ids, source, text)
        if reason is not None:
            self._end(reason)
        return len(ids)

    def end(self, reason: FinishReason, completion_tokens: int) -> None:
        """The speaking stage says that the answer is complete (its context may be shorter than the router knew).

        Raises StageFailed if it counted other tokens than were accepted."""
        if self.finished:
            return
        if completion_tokens != self.count:
            raise StageFailed(f"a stage finished with {completion_tokens} tokens, {self.count} were received")
        self._end(reason)

    def pop(self) -> list[Piece]:
        """Everything the client has not been sent yet; each piece has one source."""
        pieces, self._pieces, self.unread = self._pieces, [], 0
        return pieces

    def _cut_at_end(self, ids: Sequence[int]) -> tuple[Sequence[int], FinishReason | None]:
        if len(self.ids) + len(ids) < self._sampling.max_tokens and self._ends.isdisjoint(ids):
            return ids, None
        for offset, token in enumerate(ids):
            reason = self._end_at(self.count + offset, token)
            if reason is not None:
                return list(ids[: offset + 1]), reason
        return list(ids), None

    def _end_at(self, index: int, token: int) -> FinishReason | None:
        if index >= self._sampling.min_tokens:
            if token in self._eos:
                return FinishReason.EOS
            if token in self._stop_ids:
                return FinishReason.STOP_TOKEN
        return FinishReason.LENGTH if index + 1 >= self._sampling.max_tokens else None

    def _keep(self, run: TokenRun, ids: Sequence[int], source: Source, text: str) -> None:
        if not self._pieces or self._pieces[-1].source is not source:
            self._pieces.append(Piece(len(self.ids), source))
        piece = self._pieces[-1]
        piece.ids.extend(ids)
        self.unread += len(ids)
        if run.logprobs:
            piece.logprobs.extend(run.logprobs[: len(ids)])
        if text:
            piece.text += text
        self.ids.extend(ids)
        self.by_source[source] += len(ids)
        self.last_source = source

    def _end(self, reason: FinishReason) -> None:
        self.reason = reason
        if self._text is not None and reason is not FinishReason.STOP_STRING:
            self.last_text = self._text.finish()
