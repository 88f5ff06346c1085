"""What a stream shows depends on the ids alone, is always whole characters, and ends before a stop string."""

import codecs

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.errors import InvalidRequest
from kvrelay.text.stream import TextDelta, TextStream
from kvrelay.text.tokenizer import Tokenizer, load_tokenizer
from tests.unit.text.corpus import TEXTS

TINY = load_tokenizer("tiny")
SMOLLM2 = load_tokenizer("smollm2")

tiny_ids = st.one_of(
    st.lists(st.integers(0, 263), max_size=40),
    st.text("abé日🙂", max_size=20).map(TINY.encode),
    st.lists(st.sampled_from(list("ab€".encode())), max_size=30),
)
smollm2_ids = st.one_of(
    st.lists(st.integers(0, 49151), max_size=30), st.sampled_from([SMOLLM2.encode(text) for text in TEXTS])
)
stops = st.lists(st.text("abé日", min_size=1, max_size=4), max_size=3)


def show(tokenizer: Tokenizer, ids: list[int], stop: list[str], cuts: list[int]) -> tuple[str, int, str | None]:
    """Whole text, tokens that count, the stop string found; ids pushed in groups between the cuts."""
    stream, text, tokens = TextStream(tokenizer, stop), "", 0
    edges = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    for start, end in zip(edges, edges[1:], strict=False):
        delta = stream.push(ids[start:end])
        text, tokens = text + delta.text, tokens + delta.tokens
        if delta.stop is not None:
            assert stream.finish() == ""
            return text, tokens, delta.stop
        assert delta.tokens == end - start
    return text + stream.finish(), tokens, None


def expected(tokenizer: Tokenizer, ids: list[int], stop: list[str]) -> tuple[str, int, str | None]:
    """By looking at the text of every prefix of the ids, in which only complete characters count."""
    for count in range(len(ids) + 1):
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(b"".join(tokenizer.token_bytes(one) for one in ids[:count]), count == len(ids))
        found = sorted((text.find(string), -len(string), string) for string in stop if string in text)
        if found:
            return text[: found[0][0]], count, found[0][2]
    return tokenizer.decode(ids), len(ids), None


@settings(max_examples=300)
@given(ids=tiny_ids, stop=stops, cuts=st.lists(st.integers(0, 100), max_size=10))
def test_text_and_stop_do_not_depend_on_the_grouping(ids: list[int], stop: list[str], cuts: list[int]) -> None:
    assert show(TINY, ids, stop, cuts) == show(TINY, ids, stop, []) == show(TINY, ids, stop, list(range(len(ids))))


@settings(max_examples=300)
@given(ids=tiny_ids, stop=stops, cuts=st.lists(st.integers(0, 100), max_size=10))
def test_text_ends_right_before_the_first_stop_string(ids: list[int], stop: list[str], cuts: list[int]) -> None:
    assert show(TINY, ids, stop, cuts) == expected(TINY, ids, stop)


@settings(deadline=None)
@given(ids=smollm2_ids, cuts=st.lists(st.integers(0, 100), max_size=10))
def test_without_stop_strings_the_text_is_decodes(ids: list[int], cuts: list[int]) -> None:
    assert show(SMOLLM2, ids, [], cuts) == (SMOLLM2.decode(ids), len(ids), None)


@given(text=st.text("é日🙂a", min_size=1, max_size=12))
def test_a_piece_never_holds_half_a_character(text: str) -> None:
    stream, shown = TextStream(TINY), ""
    for token_id in TINY.encode(text):
        shown += stream.push([token_id]).text
        assert text.startswith(shown)
    assert shown == text and stream.finish() == ""


def test_half_a_character_at_the_end_becomes_a_replacement_character() -> None:
    stream = TextStream(TINY)
    assert stream.push(list("a€".encode())[:-1]).text == "a"
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""


def test_text_in_which_a_stop_string_could_begin_is_held_back_and_flushed() -> None:
    stream = TextStream(TINY, ["END."])
    assert stream.push(list(b"the EN")).text == "the "
    assert stream.push(list(b"EN")).text == "EN"
    assert stream.push(list(b"D")).text == ""
    assert stream.finish() == "END"


def test_a_stop_string_that_spans_pushes_ends_the_text_and_counts_its_tokens() -> None:
    stream = TextStream(TINY, ["END."])
    assert stream.push(list(b"fin E")) == TextDelta("fin ", 5, None)
    assert stream.push(list(b"ND.more")) == TextDelta("", 3, "END.")
    assert stream.finish() == ""


def test_a_token_that_goes_beyond_the_stop_string_counts_whole() -> None:
    (token,) = SMOLLM2.encode(" world")
    delta = TextStream(SMOLLM2, ["wo"]).push([*SMOLLM2.encode("Hello"), token, token])
    assert delta == TextDelta("Hello ", 2, "wo")


def test_of_stop_strings_that_end_together_the_first_to_begin_wins() -> None:
    assert TextStream(TINY, ["c", "bc", "abc"]).push(list(b"xabcx")) == TextDelta("x", 4, "abc")


def test_the_text_of_special_tokens_is_no_stop_string() -> None:
    stream = TextStream(SMOLLM2, ["<|im_end|>"])
    assert stream.push([*SMOLLM2.encode("done"), 2]) == TextDelta("done", 2, None)


def test_silent_ids_count_but_have_no_text() -> None:
    assert TextStream(TINY, silent=[98]).push(list(b"abc")) == TextDelta("ac", 3, None)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"stop\[1\]: is empty"):
        TextStream(TINY, ["a", ""])


def test_nothing_may_follow_the_end() -> None:
    stream = TextStream(TINY)
    stream.finish()
    with pytest.raises(AssertionError):
        stream.push([97])


def test_a_first_space_that_encoding_made_is_dropped_once() -> None:
    class Prefixed(type(TINY)):  # type: ignore[misc]
        strips_first_space = True

    stream = TextStream(Prefixed())
    assert stream.push([32]).text == "" and stream.push([32]).text == " " and stream.push([97]).text == "a"
