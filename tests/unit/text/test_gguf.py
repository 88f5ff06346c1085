"""The tokenizer in a GGUF file gives the ids of the tokenizer that the file was made of."""

import unicodedata
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

from kvrelay import checkpoint
from kvrelay.errors import InvalidRequest, ModelFileError
from kvrelay.gguf_file import open_gguf
from kvrelay.text.pieces import byte_characters
from kvrelay.text.tokenizer import load_tokenizer
from tests.unit.text.corpus import SPECIALS, TEXTS, any_text

SMOLLM2 = load_tokenizer("smollm2")


@cache
def metadata() -> dict[str, Any]:
    values = open_gguf(checkpoint.resolve("smollm2").directory).metadata
    return {key.removeprefix("tokenizer.ggml."): value for key, value in values.items()}


@cache
def original() -> Tokenizer:
    """SmolLM2's tokenizer.json, rebuilt: digits alone, then GPT-2's own splitting, in the library's native code."""
    tokens = metadata()["tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata()["merges"]]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    kinds = metadata()["token_type"]
    backend.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == 3
        ]
    )
    return backend


@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_text_equal_the_original_tokenizer(text: str) -> None:
    wanted = original().encode(text, add_special_tokens=False).ids
    assert SMOLLM2.encode(text) == wanted
    assert SMOLLM2.decode(wanted) == original().decode(wanted)
    assert SMOLLM2.decode(wanted, skip_special=False) == text


@settings(deadline=None, max_examples=200)
@given(any_text)
def test_any_text_gives_the_original_ids_and_comes_back(text: str) -> None:
    ids = SMOLLM2.encode(text)
    assert ids == original().encode(text, add_special_tokens=False).ids
    if all(byte_characters()[byte] in vocabulary() for byte in text.encode()):
        assert SMOLLM2.decode(ids, skip_special=False) == text


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 49151), max_size=30))
def test_any_ids_decode_as_the_library_decodes_them(ids: list[int]) -> None:
    assert SMOLLM2.decode(ids) == original().decode(ids, skip_special_tokens=True)


@settings(deadline=None, max_examples=100)
@given(any_text)
def test_ids_equal_merging_by_hand(text: str) -> None:
    for special in SPECIALS:
        text = text.replace(special, "")
    assert SMOLLM2.encode(text) == [one for word in words(text) for one in merged(word)]


def words(text: str) -> list[str]:
    """Digits alone; between them GPT-2's pattern."""
    pattern = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    return [
        word
        for piece in regex.findall(r"\p{N}|\P{N}+", text)
        for word in ([piece] if regex.fullmatch(r"\p{N}", piece) else regex.findall(pattern, piece))
    ]


@cache
def ranks() -> dict[tuple[str, str], int]:
    return {(left, right): i for i, (left, right) in enumerate(merge.split(" ") for merge in metadata()["merges"])}


@cache
def vocabulary() -> dict[str, int]:
    return {token: i for i, token in enumerate(metadata()["tokens"])}


def merged(word: str) -> list[int]:
    """Byte-pair encoding as its paper has it; the few bytes that SmolLM2's vocabulary lacks are dropped."""
    parts = [char for byte in word.encode() if (char := byte_characters()[byte]) in vocabulary()]
    while True:
        pairs = [(ranks().get(pair, 1 << 30), i) for i, pair in enumerate(zip(parts, parts[1:], strict=False))]
        best, i = min(pairs, default=(1 << 30, 0))
        if best == 1 << 30:
            return [vocabulary()[part] for part in parts]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizers")


@cache
def small() -> dict[str, Any]:
    """Its first 1000 tokens: all bytes and the first merges."""
    tokens = metadata()["tokens"][:1000]
    known = set(tokens)
    merges = [merge for merge in metadata()["merges"] if merge.replace(" ", "") in known]
    return {**metadata(), "tokens": tokens, "token_type": metadata()["token_type"][:1000], "merges": merges}


def write(path: Path, whole: bool = False, **changes: Any) -> Path:
    """A part of SmolLM2's tokenizer in a file of its own, with some values changed, or left out if None."""
    values = {**(metadata() if whole else small()), **changes}
    writer = gguf.GGUFWriter(path, "llama")
    for key in ("model", "pre"):
        if values[key] is not None:
            writer.add_string(f"tokenizer.ggml.{key}", values[key])
    for key in ("tokens", "token_type", "merges", "scores"):
        if values.get(key) is not None:
            writer.add_array(f"tokenizer.ggml.{key}", values[key])
    for key in ("bos_token_id", "eos_token_id", "eot_token_id", "unknown_token_id"):
        if values.get(key) is not None:
            writer.add_uint32(f"tokenizer.ggml.{key}", values[key])
    for key in ("add_bos_token", "add_eos_token", "add_space_prefix"):
        if values.get(key) is not None:
            writer.add_bool(f"tokenizer.ggml.{key}", values[key])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "gpt-2"])
def test_other_pre_tokenizers_equal_the_reference_conversion(pre: str, folder: Path) -> None:
    ours = load_tokenizer(str(write(folder / f"{pre}.gguf", whole=True, pre=pre)))
    known = {"tokenizer_type": "gpt2", "pre_tokenizer_type": pre}
    reference, _ = convert_gguf_tokenizer(
        "llama", {**known, **{key: metadata()[key] for key in ("tokens", "token_type", "merges")}}
    )
    for text in TEXTS:
        composed = unicodedata.normalize("NFC", text)
        assert ours.encode(composed) == reference.encode(composed, add_special_tokens=False).ids, text


def test_qwen2_composes_characters_first(folder: Path) -> None:
    ours = load_tokenizer(str(write(folder / "composed.gguf", pre="qwen2")))
    assert ours.encode("e\u0301") == ours.encode("é")


def test_an_absent_pre_tokenizer_name_means_llama_cpps_default(folder: Path) -> None:
    ours = load_tokenizer(str(write(folder / "default.gguf", pre=None)))
    pieces = [ours.decode([one]) for one in ours.encode("call(x) 1234567 it's")]
    assert "".join(pieces) == "call(x) 1234567 it's"
    assert all(len(piece.strip()) <= 3 for piece in pieces if piece.strip().isdigit())


def test_bos_and_eos_are_put_where_the_file_says(folder: Path) -> None:
    ours = load_tokenizer(str(write(folder / "bos.gguf", add_bos_token=True, add_eos_token=True)))
    bare = load_tokenizer(str(write(folder / "bare.gguf"))).encode("hi")
    assert ours.encode("hi") == [1, *bare, 2]
    assert ours.encode("hi", add_special=False) == bare
    assert ours.encode("") == [1, 2] and SMOLLM2.encode("") == []


def test_the_end_of_a_turn_ends_too(folder: Path) -> None:
    assert load_tokenizer(str(write(folder / "eot.gguf", eot_token_id=0))).eos_token_ids == (2, 0)


KINDS = list(zip(small()["tokens"], small()["token_type"], strict=True))


def test_user_defined_tokens_are_whole_but_not_special(folder: Path) -> None:
    kinds = [4 if token == "<jupyter_start>" else kind for token, kind in KINDS]
    ours = load_tokenizer(str(write(folder / "user.gguf", token_type=kinds)))
    (token,) = ours.encode("<jupyter_start>")
    assert not ours.is_special(token) and ours.decode([token]) == "<jupyter_start>"
    assert SMOLLM2.is_special(token) and SMOLLM2.decode([token]) == ""


def test_identity_follows_the_tokenizer_and_nothing_else(folder: Path) -> None:
    one = load_tokenizer(str(write(folder / "one.gguf")))
    two = load_tokenizer(str(write(folder / "two.gguf")))
    other = load_tokenizer(str(write(folder / "other.gguf", add_bos_token=True)))
    assert one.identity == two.identity != other.identity


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"pre": "tekken"}, "tokenizer.ggml.pre tekken is not supported"),
        ({"model": "bert"}, "tokenizer.ggml.model bert is not supported"),
        ({"model": "llama"}, "tokenizer.ggml.scores is missing"),
        ({"merges": None}, "tokenizer.ggml.merges is missing"),
        ({"merges": ["no such", "pair here"]}, "do not fit"),
        ({"token_type": [1, 1]}, "token_type has 2 entries for 1000"),
        ({"eos_token_id": 50000}, "eos_token_id 50000 of 1000"),
    ],
)
def test_a_tokenizer_that_cannot_be_used_is_refused_by_name(changes: dict[str, Any], named: str, folder: Path) -> None:
    with pytest.raises(ModelFileError, match=f"bad.gguf: .*{named}"):
        load_tokenizer(str(write(folder / "bad.gguf", **changes)))


def test_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="prompt: not valid Unicode at character 2"):
        SMOLLM2.encode("ab\ud800")


def test_ids_outside_the_vocabulary_have_no_text() -> None:
    assert SMOLLM2.decode([49152, -1, 1 << 40]) == ""


def test_smollm2_is_described() -> None:
    assert SMOLLM2.vocab_size == 49152 and SMOLLM2.eos_token_ids == (2,)
    assert SMOLLM2.special_tokens["eos_token"] == "<|im_end|>"
    assert [SMOLLM2.is_special(one) for one in (0, 1, 2, 16, 17, 500)] == [True] * 4 + [False] * 2


LETTERS = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)] + list("▁helowrdab")
WORDS = ["he", "ll", "hell", "hello", "▁w", "or", "▁wor", "ld", "▁world", "▁▁", "ab", "▁a", "▁ab", "lo", "▁h", "▁he"]


@pytest.fixture(scope="module")
def sentencepiece(folder: Path) -> Any:
    tokens = LETTERS + WORDS
    kinds = [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259)
    scores = [0.0] * len(LETTERS) + [-1.0 - i for i in range(len(WORDS))]
    values = {"tokens": tokens, "token_type": kinds, "scores": scores, "merges": None, "model": "llama", "pre": None}
    return load_tokenizer(
        str(write(folder / "spm.gguf", add_bos_token=None, add_space_prefix=True, unknown_token_id=0, **values))
    )


@settings(deadline=None)
@given(st.text("helowrdab é🙂\n", max_size=20))
def test_sentencepiece_merges_the_best_scored_pair(sentencepiece: Any, text: str) -> None:
    ids = sentencepiece.encode(text)
    assert ids == [1, *best_scored(("▁" + text if text else "").replace(" ", "▁"))]
    assert sentencepiece.decode(ids) == text


def best_scored(text: str) -> list[int]:
    """llama.cpp's rule: join the neighbours whose token scores best, the leftmost of equals; else bytes."""
    tokens, parts = LETTERS + WORDS, list(text)
    while True:
        pairs = zip(parts, parts[1:], strict=False)
        joined = [(WORDS.index(a + b), i) for i, (a, b) in enumerate(pairs) if a + b in WORDS]
        if not joined:
            break
        _, i = min(joined)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return [
        one
        for part in parts
        for one in ([tokens.index(part)] if part in tokens else [tokens.index(f"<0x{b:02X}>") for b in part.encode()])
    ]
