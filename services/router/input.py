"""A client's request -> prompt ids and sampling, or a refusal that names the field and the limit. Knows no load."""

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvrelay.errors import InvalidRequest, NotServed, Unsupported
from kvrelay.kvcache.hashing import block_hashes, root_hash
from kvrelay.proto.v1 import router_pb2
from kvrelay.rpc.convert import (
    handoff_mode_from_proto,
    pipeline_from_client,
    sampling_from_client,
    token_ids_from_client,
)
from kvrelay.text.chat import ChatTurn, render
from kvrelay.text.tokenizer import Tokenizer
from kvrelay.types import HandoffMode, LayoutFingerprint, Pipeline, Sampling

T = TypeVar("T")

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_NAME_CHARS = 128
"""Of request_id and cache_salt."""

_PROMPT_FIELDS = {"prompt": "prompt", "chat": "chat.messages", "token_ids": "token_ids.ids"}
"""What a client calls the prompt, by the input it gave."""


@dataclass(frozen=True, slots=True)
class Served:
    """What the fleet serves now."""

    models: frozenset[str]
    """Names by which a client may ask for it."""
    vocab_size: int
    max_model_tokens: int
    """Prompt + output."""
    eos_token_ids: tuple[int, ...]
    layout: LayoutFingerprint
    root: bytes
    """Parent of every first block of a request without a cache_salt."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A valid request."""

    request_id: str
    prompt_ids: Sequence[int]
    """The message's own field if the client gave ids: protobuf copies that 100 times as fast as Python's integers."""
    root: bytes
    """Parent of the first block."""
    hashes: tuple[bytes, ...]
    """Of the prompt's whole blocks."""
    sampling: Sampling
    stop: tuple[str, ...]
    return_text: bool
    cache_salt: str
    pipeline: Pipeline | None
    handoff_mode: HandoffMode | None


class Reader:
    """Reads requests for one tokenizer. Text longer than `long_chars` is handled in a thread."""

    def __init__(self, tokenizer: Tokenizer, *, long_chars: int, max_chars: int) -> None:
        self._tokenizer = tokenizer
        self._long_chars = long_chars
        self._max_chars = max_chars

    async def read(self, request: router_pb2.GenerateRequest, served: Served) -> Ask:
        """Raises InvalidRequest, Unsupported or NotServed."""
        _refuse_unsupported(request)
        if request.model and request.model not in served.models:
            raise NotServed(f"model: {request.model!r} is not served; {', '.join(sorted(served.models))} is")
        return_text = request.return_text if request.HasField("return_text") else True
        _check_stop(request, return_text)
        _check_names(request)
        pipeline = pipeline_from_client(request.pipeline)
        mode = handoff_mode_from_proto(request.handoff_mode)
        ids = await self._ids(request, served)
        sampling = sampling_from_client(
            request.sampling,
            prompt_tokens=len(ids),
            max_model_tokens=served.max_model_tokens,
            vocab_size=served.vocab_size,
            draw_seed=lambda: secrets.randbits(64),
            prompt_field=_PROMPT_FIELDS[request.WhichOneof("input") or "prompt"],
        )
        root = root_hash(served.layout, request.cache_salt) if request.cache_salt else served.root
        hashes = await self._off_loop(len(ids), lambda: block_hashes(root, ids, served.layout.block_tokens))
        return Ask(
            request_id=request.request_id or secrets.token_hex(16),
            prompt_ids=request.token_ids.ids or ids,
            root=root,
            hashes=tuple(hashes),
            sampling=sampling,
            stop=tuple(request.stop),
            return_text=return_text,
            cache_salt=request.cache_salt,
            pipeline=pipeline,
            handoff_mode=mode,
        )

    async def tokenize(self, request: router_pb2.TokenizeRequest) -> list[int]:
        """Ids of a prompt or chat. Raises InvalidRequest."""
        kind = request.WhichOneof("input")
        if kind == "prompt":
            return await self._prompt(request.prompt)
        if kind == "chat":
            return await self._chat(request.chat)
        raise InvalidRequest("input", "exactly one of prompt, chat must be set")

    async def _ids(self, request: router_pb2.GenerateRequest, served: Served) -> list[int]:
        kind = request.WhichOneof("input")
        if kind == "prompt":
            return await self._prompt(request.prompt)
        if kind == "chat":
            return await self._chat(request.chat)
        if kind != "token_ids":
            raise InvalidRequest("input", "exactly one of prompt, chat, token_ids must be set")
        if not request.token_ids.ids:
            raise InvalidRequest("token_ids.ids", "must not be empty")
        return token_ids_from_client(request.token_ids.ids, vocab_size=served.vocab_size, field="token_ids.ids")

    async def _prompt(self, text: str) -> list[int]:
        if not text:
            raise InvalidRequest("prompt", "must not be empty")
        self._check_chars("prompt", len(text))
        ids = await self._off_loop(len(text), lambda: self._tokenizer.encode(text))
        if not ids:
            raise InvalidRequest("prompt", "has no tokens")
        return ids

    async def _chat(self, chat: router_pb2.Chat) -> list[int]:
        turns = [ChatTurn(message.role, message.content) for message in chat.messages]
        chars = sum(len(turn.content) for turn in turns)
        self._check_chars("chat.messages", chars)

        def ids() -> list[int]:
            return self._tokenizer.encode(render(self._tokenizer, turns), add_special=False)

        return await self._off_loop(chars, ids)

    def _check_chars(self, field: str, chars: int) -> None:
        if chars > self._max_chars:
            raise InvalidRequest(field, f"must be at most {self._max_chars} characters, got {chars}")

    async def _off_loop(self, size: int, work: Callable[[], T]) -> T:
        return await asyncio.to_thread(work) if size > self._long_chars else work()


def _refuse_unsupported(request: router_pb2.GenerateRequest) -> None:
    if request.HasField("n") and request.n != 1:
        raise Unsupported(f"n: only 1 is supported, got {request.n}")
    for name in ("logit_bias", "grammar", "lora"):
        if getattr(request, name):
            raise Unsupported(f"{name} is not supported")
    if request.HasField("prompt_logprobs"):
        raise Unsupported("prompt_logprobs is not supported")


def _check_stop(request: router_pb2.GenerateRequest, return_text: bool) -> None:
    if request.stop and not return_text:
        raise InvalidRequest("stop", "stop strings need text output, but return_text is false")
    if len(request.stop) > MAX_STOP_STRINGS:
        raise InvalidRequest("stop", f"must be at most {MAX_STOP_STRINGS} strings, got {len(request.stop)}")
    for index, text in enumerate(request.stop):
        if not text or len(text) > MAX_STOP_CHARS:
            raise InvalidRequest(f"stop[{index}]", f"must have 1 to {MAX_STOP_CHARS} characters, got {len(text)}")


def _check_names(request: router_pb2.GenerateRequest) -> None:
    for name in ("request_id", "cache_salt"):
        value: str = getattr(request, name)
        if len(value) > MAX_NAME_CHARS or not value.isprintable():
            raise InvalidRequest(name, f"must be at most {MAX_NAME_CHARS} printable characters, got {len(value)}")
