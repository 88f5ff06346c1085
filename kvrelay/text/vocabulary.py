"""A tokenizer over the `tokenizers` library, whatever file it came from. Knows no file format."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import tokenizers

from kvrelay.text.pieces import Spelling
from kvrelay.text.unicode import utf8


@dataclass(frozen=True, slots=True)
class VocabularyTokenizer:
    """Ids from the library; text from its own table of bytes, so that a stream's text is decode's text exactly."""

    backend: tokenizers.Tokenizer = field(repr=False)
    spelling: Spelling = field(repr=False)
    special_ids: frozenset[int] = field(repr=False)
    added_ids: frozenset[int] = field(repr=False)
    """Tokens that spell themselves; the special ones are among them."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    identity: str
    chat_template: str | None = field(repr=False)
    special_tokens: dict[str, str]
    strips_first_space: bool = False
    prefix_ids: tuple[int, ...] = ()
    """Put before a text by add_special, beside what the backend's own post-processor puts there."""
    suffix_ids: tuple[int, ...] = ()
    _bytes: dict[int, bytes] = field(default_factory=dict, repr=False)
    """Spelled so far, specials included."""

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        utf8(text)
        # The batch form lets go of the GIL, so that a long prompt encoded in a thread does not stop the event loop.
        (encoding,) = self.backend.encode_batch_fast([text], add_special_tokens=add_special)
        ids: list[int] = encoding.ids
        return [*self.prefix_ids, *ids, *self.suffix_ids] if add_special else ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        text = b"".join(self.token_bytes(one, skip_special) for one in ids).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.strips_first_space else text

    def token_bytes(self, token_id: int, skip_special: bool = True) -> bytes:
        if skip_special and token_id in self.special_ids:
            return b""
        spelled = self._bytes.get(token_id)
        if spelled is None:
            spelled = self._bytes[token_id] = self._spell(token_id)
        return spelled

    def is_special(self, token_id: int) -> bool:
        return token_id in self.special_ids

    def _spell(self, token_id: int) -> bytes:
        token = self.backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
        if token is None:
            return b""
        return token.encode() if token_id in self.added_ids else self.spelling(token)


def special_and_added(backend: tokenizers.Tokenizer) -> tuple[frozenset[int], frozenset[int]]:
    """(special ids, all added ids)."""
    added = backend.get_added_tokens_decoder()
    return frozenset(one for one, token in added.items() if token.special), frozenset(added)
