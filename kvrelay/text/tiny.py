"""The tiny model's tokenizer: one id a byte, and eight specials. Knows no files."""

import hashlib
import re
from collections.abc import Sequence

from kvrelay.text.unicode import utf8

SPECIALS = ("<bos>", "<eos>", "<system>", "<user>", "<assistant>", "<tool>", "<end>", "<pad>")
"""Ids 256, 257, ..."""

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] + '<end>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


class TinyTokenizer:
    """UTF-8 bytes as ids; add_special puts nothing around a text, so that tests count bytes."""

    vocab_size = 256 + len(SPECIALS)
    eos_token_ids = (257,)
    identity = hashlib.blake2b(f"tiny/{SPECIALS}/{CHAT_TEMPLATE}".encode(), digest_size=16).hexdigest()
    chat_template = CHAT_TEMPLATE
    strips_first_space = False

    def __init__(self) -> None:
        self.special_tokens = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
        self._split = re.compile("(" + "|".join(map(re.escape, SPECIALS)) + ")")

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        utf8(text)
        ids: list[int] = []
        for part in self._split.split(text):
            ids += [256 + SPECIALS.index(part)] if part in SPECIALS else part.encode()
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return b"".join(self.token_bytes(one, skip_special) for one in ids).decode("utf-8", "replace")

    def token_bytes(self, token_id: int, skip_special: bool = True) -> bytes:
        if 0 <= token_id < 256:
            return bytes((token_id,))
        if skip_special or not self.is_special(token_id):
            return b""
        return SPECIALS[token_id - 256].encode()

    def is_special(self, token_id: int) -> bool:
        return 256 <= token_id < self.vocab_size
