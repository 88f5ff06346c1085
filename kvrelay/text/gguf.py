"""The tokenizer inside a GGUF file. Knows llama.cpp's pre-tokenizer names and token types; no weights."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from kvrelay.errors import ModelFileError
from kvrelay.gguf_file import GgufFile, eos_token_ids, open_gguf
from kvrelay.text.pieces import Spelling, byte_level, sentencepiece
from kvrelay.text.vocabulary import VocabularyTokenizer, special_and_added

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")

PRE_TOKENIZERS = {
    "gpt-2": (_GPT2,),
    "gpt2": (_GPT2,),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2.removesuffix(r"|\s+"), r"\p{N}+", "[0-9][0-9][0-9]"),
    "smollm": (r"\p{N}", _GPT2.removesuffix(r"|\s+")),
    "llama-bpe": (_LLAMA3,),
    "llama3": (_LLAMA3,),
    "llama-v3": (_LLAMA3,),
    "qwen2": (_QWEN2,),
    "deepseek-r1-qwen": (_QWEN2,),
}
"""tokenizer.ggml.pre -> regular expressions, each of which splits the pieces that those before it left."""

_WHOLE_WORDS_FIRST = ("llama-bpe", "llama3", "llama-v3")
_NFC = ("qwen2", "deepseek-r1-qwen")

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
"""tokenizer.ggml.token_type."""

_SPECIAL_NAMES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def load_gguf_tokenizer(path: Path) -> VocabularyTokenizer:
    """Raises ModelFileError: unreadable file, or a tokenizer of another kind, by name."""
    file = open_gguf(path)
    tokens = _strings(file, "tokenizer.ggml.tokens")
    types = file.get("tokenizer.ggml.token_type", list) or [1] * len(tokens)
    if len(types) != len(tokens):
        raise ModelFileError(f"{path}: tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
    kind = file.need("tokenizer.ggml.model", str)
    backend, spelling = _backend(file, kind, tokens)
    backend.add_special_tokens(
        [_added(token, True) for token, one in zip(tokens, types, strict=True) if one == CONTROL]
    )
    backend.add_tokens([_added(token, False) for token, one in zip(tokens, types, strict=True) if one == USER_DEFINED])
    special, added = special_and_added(backend)
    return VocabularyTokenizer(
        backend=backend,
        spelling=spelling,
        special_ids=special,
        added_ids=added,
        vocab_size=len(tokens),
        eos_token_ids=eos_token_ids(file),
        identity=hashlib.blake2b(_tokenizer_bytes(file), digest_size=16).hexdigest(),
        chat_template=file.get("tokenizer.chat_template", str),
        special_tokens=dict(_special_tokens(file, tokens)),
        strips_first_space=kind == "llama" and file.get("tokenizer.ggml.add_space_prefix", bool) is not False,
        prefix_ids=_around(file, "bos", default=kind == "llama"),
        suffix_ids=_around(file, "eos", default=False),
    )


def _backend(file: GgufFile, kind: str, tokens: list[str]) -> tuple[Tokenizer, Spelling]:
    vocabulary = {token: i for i, token in enumerate(tokens)}
    try:
        if kind == "gpt2":
            return _byte_level_bpe(file, vocabulary), byte_level()
        if kind == "llama":
            return _sentencepiece_bpe(file, tokens, vocabulary), sentencepiece()
    except ModelFileError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise ModelFileError(f"{file.path}: the tokenizer's vocabulary and merges do not fit: {error}") from error
    raise ModelFileError(f"{file.path}: tokenizer.ggml.model {kind} is not supported (gpt2, llama are)")


def _byte_level_bpe(file: GgufFile, vocabulary: dict[str, int]) -> Tokenizer:
    pre = file.get("tokenizer.ggml.pre", str) or "default"
    if pre not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise ModelFileError(f"{file.path}: tokenizer.ggml.pre {pre} is not supported ({known} are)")
    pairs = [merge.split(" ", 1) for merge in _strings(file, "tokenizer.ggml.merges")]
    merges = [(pair[0], pair[-1]) for pair in pairs]
    backend = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre in _WHOLE_WORDS_FIRST))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PRE_TOKENIZERS[pre]]
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, as_bytes])
    if pre in _NFC:
        backend.normalizer = normalizers.NFC()
    return backend


def _sentencepiece_bpe(file: GgufFile, tokens: list[str], vocabulary: dict[str, int]) -> Tokenizer:
    """SentencePiece merges the pair whose result scores best: the same as merges listed by falling score."""
    scores = file.need("tokenizer.ggml.scores", list)
    if len(scores) != len(tokens):
        raise ModelFileError(f"{file.path}: tokenizer.ggml.scores has {len(scores)} entries for {len(tokens)} tokens")
    unknown = file.get("tokenizer.ggml.unknown_token_id", int)
    merges = [
        (token[:cut], token[cut:])
        for _, token in sorted(((-score, token) for token, score in zip(tokens, scores, strict=True)), key=_by_score)
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    backend = Tokenizer(
        models.BPE(
            vocabulary,
            merges,
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", "\u2581")
    prefixed = file.get("tokenizer.ggml.add_space_prefix", bool) is not False
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), spaces]) if prefixed else spaces
    return backend


def _by_score(entry: tuple[float, str]) -> float:
    return entry[0]


def _added(token: str, special: bool) -> AddedToken:
    return AddedToken(token, special=special, normalized=False)


def _strings(file: GgufFile, key: str) -> list[str]:
    values = file.need(key, list)
    if not all(isinstance(value, str) for value in values):
        raise ModelFileError(f"{file.path}: {key} is not a list of strings")
    return values


def _special_tokens(file: GgufFile, tokens: list[str]) -> Iterator[tuple[str, str]]:
    for name, short in _SPECIAL_NAMES.items():
        token_id = file.get(f"tokenizer.ggml.{short}_token_id", int)
        if token_id is not None:
            if not 0 <= token_id < len(tokens):
                raise ModelFileError(f"{file.path}: tokenizer.ggml.{short}_token_id {token_id} of {len(tokens)} tokens")
            yield name, tokens[token_id]


def _around(file: GgufFile, short: str, default: bool) -> tuple[int, ...]:
    """The BOS or EOS id, if the file says that a text gets one."""
    wanted = file.get(f"tokenizer.ggml.add_{short}_token", bool)
    token_id = file.get(f"tokenizer.ggml.{short}_token_id", int)
    return (token_id,) if token_id is not None and (default if wanted is None else wanted) else ()


def _tokenizer_bytes(file: GgufFile) -> bytes:
    """Everything that the metadata says of the tokenizer, in canonical form."""
    entries = sorted((key, value) for key, value in file.metadata.items() if key.startswith("tokenizer."))
    return repr(entries).encode("utf-8", "surrogatepass")
