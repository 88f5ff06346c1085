"""Strings that may come from anywhere -> UTF-8. Knows no tokens."""

from kvrelay.errors import InvalidRequest


def utf8(text: str, field: str = "prompt") -> bytes:
    """The text's bytes. Raises InvalidRequest(field, ...) if it holds a lone surrogate."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(field, f"not valid Unicode at character {error.start}") from None
