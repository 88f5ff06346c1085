"""The tiny tokenizer is bytes and eight specials."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.errors import InvalidRequest
from kvrelay.model.tiny import CONFIG
from kvrelay.text.tokenizer import load_tokenizer

TINY = load_tokenizer("tiny")


@given(st.text())
def test_text_comes_back_and_counts_its_bytes(text: str) -> None:
    ids = TINY.encode(text)
    assert TINY.decode(ids, skip_special=False) == text
    assert "<" in text or len(ids) == len(text.encode())


def test_specials_are_tokens_without_text() -> None:
    assert TINY.encode("<user>a<end>") == [259, 97, 262]
    assert TINY.decode([256, 97, 257, 263]) == "a"
    assert TINY.decode([257], skip_special=False) == "<eos>"
    assert TINY.decode([264, 300, -1]) == ""


def test_it_fits_the_tiny_model() -> None:
    assert TINY.vocab_size == CONFIG.vocab_size
    assert TINY.eos_token_ids == CONFIG.eos_token_ids


def test_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="prompt: not valid Unicode"):
        TINY.encode("\udc00")
