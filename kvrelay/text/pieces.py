"""What one token spells, in bytes, for the two spellings there are. Knows no vocabulary."""

import re
from collections.abc import Callable

Spelling = Callable[[str], bytes]
"""A token as its vocabulary writes it -> the bytes that it adds to a text."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_level() -> Spelling:
    """GPT-2's: one printable character a byte. A token with any other character (an added one) spells itself."""
    bytes_of = {char: byte for byte, char in byte_characters().items()}

    def spell(token: str) -> bytes:
        try:
            return bytes([bytes_of[char] for char in token])
        except KeyError:
            return token.encode()

    return spell


def sentencepiece() -> Spelling:
    """SentencePiece's: U+2581 is a space, <0xNN> a byte."""

    def spell(token: str) -> bytes:
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes((int(byte[1], 16),)) if byte else token.replace("\u2581", " ").encode()

    return spell


def byte_characters() -> dict[int, str]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, the other bytes for U+0100, U+0101, ..."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + i) for i, byte in enumerate(others)}
