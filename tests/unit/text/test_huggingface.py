"""tokenizer.json and the files beside it are read as they are meant."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from kvrelay.errors import ModelFileError
from kvrelay.text.pieces import byte_characters
from kvrelay.text.tokenizer import load_tokenizer
from tests.unit.text.corpus import TEXTS


def byte_level() -> Tokenizer:
    """Bytes and two merges, two specials, one plain added token, BOS in front of a text."""
    vocab = {char: byte for byte, char in byte_characters().items()} | {"he": 256, "Ġhe": 257}
    backend = Tokenizer(models.BPE(vocab, [("h", "e"), ("Ġ", "he")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    backend.add_tokens([AddedToken("<tool é>", special=False)])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 258)])
    return backend


def save(directory: Path, backend: Tokenizer, **config: Any) -> Path:
    (directory / "config.json").write_text(json.dumps({"eos_token_id": 259}))
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_text_equal_the_library(text: str, tmp_path: Path) -> None:
    backend = byte_level()
    ours = load_tokenizer(str(save(tmp_path, backend)))
    for add_special in (True, False):
        wanted = backend.encode(text, add_special_tokens=add_special).ids
        assert ours.encode(text, add_special) == wanted
        assert ours.decode(wanted) == backend.decode(wanted) == text


def test_added_tokens_spell_themselves_unless_special(tmp_path: Path) -> None:
    ours = load_tokenizer(str(save(tmp_path, byte_level())))
    ids = ours.encode("a<tool é>b</s>")
    assert ids == [258, 97 - 0x21, 260, 98 - 0x21, 259] or ids[0] == 258
    assert ours.decode(ids) == "a<tool é>b"
    assert ours.decode(ids, skip_special=False) == "<s>a<tool é>b</s>"
    assert ours.is_special(259) and not ours.is_special(260)
    assert ours.vocab_size == 261


def test_special_tokens_and_template_come_from_the_config(tmp_path: Path) -> None:
    config = {
        "bos_token": {"content": "<s>"},
        "eos_token": "</s>",
        "chat_template": "{{ messages }}",
        "pad_token": None,
    }
    ours = load_tokenizer(str(save(tmp_path, byte_level(), **config)))
    assert ours.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert ours.chat_template == "{{ messages }}" and ours.eos_token_ids == (259,)


def test_a_template_file_wins_and_named_templates_have_a_default(tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]
    directory = save(tmp_path, byte_level(), chat_template=named)
    before = load_tokenizer(str(directory))
    assert before.chat_template == "d"
    (directory / "chat_template.jinja").write_text("from the file")
    after = load_tokenizer(str(directory))
    assert after.chat_template == "from the file" and after.identity != before.identity


def test_eos_is_the_named_token_if_no_config_has_an_id(tmp_path: Path) -> None:
    directory = save(tmp_path, byte_level(), eos_token="</s>")
    (directory / "config.json").write_text("{}")
    assert load_tokenizer(str(directory)).eos_token_ids == (259,)


def test_truncation_and_padding_in_the_file_are_ignored(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    assert len(load_tokenizer(str(save(tmp_path, backend))).encode("zzzzzzzz")) == 9


def test_sentencepiece_form_drops_one_first_space(tmp_path: Path) -> None:
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁": 256, "h": 257, "i": 258}
    backend = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    ours = load_tokenizer(str(save(tmp_path, backend)))
    ids = ours.encode("hi é  i")
    assert ours.decode(ids) == backend.decode(ids) == "hi é  i"
    assert ours.strips_first_space


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (None, "missing"),
        ("{", "not readable as JSON"),
        ("[]", "JSON object was expected"),
        ('{"model": {"type": "Nonsense"}}', "not a tokenizer"),
    ],
)
def test_a_broken_file_is_refused_by_name(content: str | None, named: str, tmp_path: Path) -> None:
    directory = save(tmp_path, byte_level())
    path = directory / "tokenizer.json"
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(ModelFileError, match=f"tokenizer.json: .*{named}"):
        load_tokenizer(str(directory))


def test_a_decoder_of_another_kind_is_refused(tmp_path: Path) -> None:
    backend = byte_level()
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ModelFileError, match="decoder WordPiece is not supported"):
        load_tokenizer(str(save(tmp_path, backend)))
