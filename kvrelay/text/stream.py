"""Ids as they come -> text that may be shown. Owns whole characters and stop strings; knows no sampling."""

import codecs
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kvrelay.errors import InvalidRequest
from kvrelay.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What one push added."""

    text: str
    """May be shown now; final."""
    tokens: int
    """How many of the pushed ids count: all, or up to and including the one that completes the stop string."""
    stop: str | None
    """The stop string that was found; the stream takes no more ids then."""


class TextStream:
    """The text of one answer. Depends only on the ids, never on how they were grouped into pushes.

    Text is held back while a character is incomplete, or while a stop string could begin in it. A stop string ends the
    text right before it; of several that end at one token the one that begins first wins, of those the longest.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), silent: Collection[int] = ()) -> None:
        """silent: ids that count but have no text, as special tokens have none (a request's stop_token_ids).

        Raises InvalidRequest("stop[i]", ...) if a stop string is empty.
        """
        for i, string in enumerate(stop):
            if not string:
                raise InvalidRequest(f"stop[{i}]", "is empty")
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._silent = frozenset(silent)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = tokenizer.strips_first_space
        self._held = ""
        self._found: str | None = None
        self._ended = False

    def push(self, ids: Sequence[int]) -> TextDelta:
        """Takes the next ids of the answer."""
        assert not self._ended, "the text has ended"
        shown = ""
        for count, token_id in enumerate(ids, 1):
            shown += self._take(self._bytes(token_id), final=False)
            if self._found is not None:
                self._ended = True
                return TextDelta(shown, count, self._found)
        return TextDelta(shown, len(ids), None)

    def finish(self) -> str:
        """The answer has ended: what was held back. An incomplete character becomes U+FFFD. Idempotent."""
        if self._ended:
            return ""
        self._ended = True
        shown = self._take(b"", final=True)
        shown, self._held = shown + self._held, ""
        return shown

    def _bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self._silent else self._tokenizer.token_bytes(token_id)

    def _take(self, piece: bytes, final: bool) -> str:
        """Decodes and returns what can no longer be part of a stop string."""
        text = self._decoder.decode(piece, final)
        if self._strip and text:
            text, self._strip = text.removeprefix(" "), False
        self._held += text
        start, self._found = self._find()
        if self._found is not None:
            shown, self._held = self._held[:start], ""
            return shown
        keep = self._undecided()
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown

    def _find(self) -> tuple[int, str | None]:
        """The first stop string in the held text, and where it begins."""
        found = [(self._held.find(string), -len(string), string) for string in self._stop]
        start, _, string = min((one for one in found if one[0] >= 0), default=(0, 0, None))
        return start, string

    def _undecided(self) -> int:
        """Length of the longest end of the held text with which some stop string begins."""
        longest = max((len(string) - 1 for string in self._stop), default=0)
        for size in range(min(longest, len(self._held)), 0, -1):
            end = self._held[-size:]
            if any(string.startswith(end) for string in self._stop):
                return size
        return 0
