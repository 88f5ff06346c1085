"""The tokenizer of a Hugging Face directory: tokenizer.json and the files beside it. Knows no weights."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from kvrelay.checkpoint import eos_token_ids, read_json, read_optional_json
from kvrelay.errors import ModelFileError
from kvrelay.text.pieces import Spelling, byte_level, sentencepiece
from kvrelay.text.vocabulary import VocabularyTokenizer, special_and_added

_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


def load_huggingface_tokenizer(directory: Path) -> VocabularyTokenizer:
    """Raises ModelFileError: a missing or corrupt file, or a decoder of another kind, by name."""
    path = directory / "tokenizer.json"
    raw = read_json(path)
    try:
        backend = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ModelFileError(f"{path}: not a tokenizer: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    config = read_optional_json(directory / "tokenizer_config.json")
    special, added = special_and_added(backend)
    spelling, strips = _spelling(path, raw.get("decoder"))
    special_tokens = dict(_special_tokens(directory, config))
    return VocabularyTokenizer(
        backend=backend,
        spelling=spelling,
        special_ids=special,
        added_ids=added,
        vocab_size=1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1),
        eos_token_ids=eos_token_ids(directory) or _named_eos(backend, special_tokens),
        identity=_identity(directory),
        chat_template=_chat_template(directory, config),
        special_tokens=special_tokens,
        strips_first_space=strips,
    )


def _spelling(path: Path, decoder: Any) -> tuple[Spelling, bool]:
    """How tokens spell, and whether a text's first space is dropped."""
    parts = _decoders(decoder)
    kinds = [part.get("type") for part in parts]
    if "ByteLevel" in kinds:
        return byte_level(), False
    if "Metaspace" in kinds:
        (metaspace,) = (part for part in parts if part.get("type") == "Metaspace")
        return sentencepiece(), metaspace.get("prepend_scheme", "always") != "never"
    if "ByteFallback" in kinds and {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "} in parts:
        return sentencepiece(), any(part.get("type") == "Strip" and part.get("start") for part in parts)
    named = ", ".join(map(str, kinds)) or "none"
    raise ModelFileError(f"{path}: decoder {named} is not supported (ByteLevel, Metaspace, ByteFallback are)")


def _decoders(decoder: Any) -> list[dict[str, Any]]:
    """A sequence's parts, or the one decoder there is."""
    if not isinstance(decoder, dict):
        return []
    if decoder.get("type") == "Sequence":
        return [part for one in decoder.get("decoders", []) for part in _decoders(one)]
    return [decoder]


def _special_tokens(directory: Path, config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """A name's token is written as a string, or as an object with its content."""
    named = {**read_optional_json(directory / "special_tokens_map.json"), **config}
    for name in _SPECIAL_NAMES:
        value = named.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            yield name, content


def _named_eos(backend: Tokenizer, special_tokens: Mapping[str, str]) -> tuple[int, ...]:
    token_id = backend.token_to_id(special_tokens.get("eos_token", ""))
    return () if token_id is None else (token_id,)


def _chat_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, or the field of tokenizer_config.json: a string, or named ones of which "default" counts."""
    path = directory / "chat_template.jinja"
    if path.exists():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ModelFileError(f"{path}: not readable: {error}") from error
    value = config.get("chat_template")
    if isinstance(value, list):
        value = {one["name"]: one["template"] for one in value}.get("default")
    return value if isinstance(value, str) else None


def _identity(directory: Path) -> str:
    """Digest over the files that make the tokenizer."""
    digest = hashlib.blake2b(digest_size=16)
    for name in _FILES:
        path = directory / name
        digest.update(json.dumps([name, path.exists()]).encode())
        if path.exists():
            digest.update(path.read_bytes())
    return digest.hexdigest()
