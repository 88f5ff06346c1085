"""What a tokenizer is, and how one is opened. Knows no torch: the router uses it."""

from collections.abc import Sequence
from typing import Protocol

from kvrelay import checkpoint


class Tokenizer(Protocol):
    """Text <-> ids. Safe to use from several threads."""

    @property
    def vocab_size(self) -> int:
        """Ids are 0 .. vocab_size - 1; a model's vocabulary may be padded beyond it."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids that end an answer, as the model's files name them."""
        ...

    @property
    def identity(self) -> str:
        """Hex digest: equal exactly if two tokenizers were made from the same data."""
        ...

    @property
    def chat_template(self) -> str | None:
        """Jinja source; None: the model is not for chat."""
        ...

    @property
    def special_tokens(self) -> dict[str, str]:
        """What a chat template may name: "bos_token", "eos_token", "pad_token", "unk_token"; only those that exist."""
        ...

    @property
    def strips_first_space(self) -> bool:
        """Whether a text's first space is an artefact of encoding and is dropped by decode."""
        ...

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Ids of text; names of special tokens in it become those tokens.

        add_special puts what the model expects around a text (a BOS token, say); a rendered chat has it already, so
        encode that with add_special=False. "" gives no ids but those.
        Raises InvalidRequest("prompt", ...) if text is not valid Unicode.
        """
        ...

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of ids; incomplete or invalid UTF-8 becomes U+FFFD, ids outside the vocabulary nothing."""
        ...

    def token_bytes(self, token_id: int, skip_special: bool = True) -> bytes:
        """The UTF-8 bytes, perhaps of half a character, that one id adds to a text."""
        ...

    def is_special(self, token_id: int) -> bool:
        """Whether the id is a control token, never part of a text."""
        ...


def load_tokenizer(model: str) -> Tokenizer:
    """The tokenizer of "tiny", "smollm2", a Hugging Face directory or a .gguf file.

    Blocks for up to a second or two: not for the event loop. Raises ModelFileError naming file and cause.
    """
    found = checkpoint.resolve(model)
    if found.kind == "tiny":
        from kvrelay.text.tiny import TinyTokenizer

        return TinyTokenizer()
    if found.kind == "gguf":
        from kvrelay.text.gguf import load_gguf_tokenizer

        return load_gguf_tokenizer(found.directory)
    from kvrelay.text.huggingface import load_huggingface_tokenizer

    return load_huggingface_tokenizer(found.directory)
