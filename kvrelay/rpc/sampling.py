"""Sampling parameters at the edge: defaults, limits, and messages that name the field and the limit."""

import math
from collections.abc import Callable, Sequence

from kvrelay.errors import InvalidRequest
from kvrelay.proto.v1 import common_pb2
from kvrelay.types import Sampling

MAX_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 64

_OPTIONAL = ("logprobs",)
_REPEATED = ("stop_token_ids",)
_SCALARS = tuple(name for name in Sampling.__slots__ if name not in (*_OPTIONAL, *_REPEATED))


def sampling_to_proto(sampling: Sampling) -> common_pb2.Sampling:
    """Router -> stage: every field set (logprobs only if wanted)."""
    message = common_pb2.Sampling(
        **{name: getattr(sampling, name) for name in _SCALARS}, stop_token_ids=sampling.stop_token_ids
    )
    if sampling.logprobs is not None:
        message.logprobs = sampling.logprobs
    return message


def sampling_from_proto(message: common_pb2.Sampling, field: str = "sampling") -> Sampling:
    """Router -> stage. InvalidRequest: a field is not set, or out of a range that does not depend on the model."""
    for name in _SCALARS:
        if not message.HasField(name):  # type: ignore[arg-type]  # names come from Sampling itself
            raise InvalidRequest(f"{field}.{name}", "must be set")
    sampling = Sampling(
        **{name: getattr(message, name) for name in _SCALARS},
        stop_token_ids=tuple(message.stop_token_ids),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
    )
    _check(sampling, field)
    return sampling


def sampling_from_client(
    message: common_pb2.Sampling,
    *,
    prompt_tokens: int,
    max_model_tokens: int,
    vocab_size: int,
    draw_seed: Callable[[], int],
    field: str = "sampling",
    prompt_field: str = "prompt",
) -> Sampling:
    """Client -> router: unset fields take the defaults that common.proto names.

    `max_model_tokens` bounds prompt + output; `draw_seed` -> [0, 2**64) is asked only if the client gave no seed.
    InvalidRequest names the field and the limit; also if the prompt, which the client gave as `prompt_field`, leaves no
    room for one token.
    """
    room = max_model_tokens - prompt_tokens
    if room < 1:
        raise InvalidRequest(
            prompt_field, f"must be at most {max_model_tokens - 1} tokens (max_model_tokens - 1), got {prompt_tokens}"
        )
    given = {
        name: getattr(message, name)
        for name in (*_SCALARS, *_OPTIONAL)
        if message.HasField(name)  # type: ignore[arg-type]  # names come from Sampling itself
    }
    given.setdefault("max_tokens", room)
    if "seed" not in given:
        given["seed"] = draw_seed()
    # Repeats change nothing, so they do not count against the limit.
    sampling = Sampling(**given, stop_token_ids=tuple(dict.fromkeys(message.stop_token_ids)))
    _check(sampling, field)
    if sampling.max_tokens > room:
        raise InvalidRequest(
            f"{field}.max_tokens",
            f"must be at most {room} (max_model_tokens {max_model_tokens} - prompt {prompt_tokens}), "
            f"got {sampling.max_tokens}",
        )
    token_ids_from_client(sampling.stop_token_ids, vocab_size=vocab_size, field=f"{field}.stop_token_ids")
    return sampling


def token_ids_from_client(ids: Sequence[int], *, vocab_size: int, field: str) -> list[int]:
    """`ids`, unsigned as in every proto, as a list. InvalidRequest naming the first id outside the vocabulary."""
    plain = list(ids)
    if plain and max(plain) >= vocab_size:
        index = next(i for i, token in enumerate(plain) if token >= vocab_size)
        raise InvalidRequest(
            f"{field}[{index}]", f"must be a token id below {vocab_size} (vocabulary), got {plain[index]}"
        )
    return plain


def _legal(s: Sampling) -> bool:
    """Whether `_check` would find nothing; nearly always, and at a tenth of its cost. NaN fails every comparison."""
    return (
        0 <= s.temperature < math.inf
        and 0 < s.top_p <= 1
        and 0 <= s.min_p <= 1
        and 0 < s.repetition_penalty < math.inf
        and -2 <= s.presence_penalty <= 2
        and -2 <= s.frequency_penalty <= 2
        and s.min_tokens <= s.max_tokens >= 1
        and (s.logprobs is None or s.logprobs <= MAX_LOGPROBS)
        and len(s.stop_token_ids) <= MAX_STOP_TOKEN_IDS
    )


def _check(sampling: Sampling, field: str) -> None:
    if _legal(sampling):
        return

    def require(name: str, holds: Callable[[float], bool], limit: str) -> None:
        value = getattr(sampling, name)
        if not (math.isfinite(value) and holds(value)):
            raise InvalidRequest(f"{field}.{name}", f"must be {limit}, got {value}")

    require("temperature", lambda v: v >= 0, ">= 0 and finite")
    require("top_p", lambda v: 0 < v <= 1, "in (0, 1]")
    require("min_p", lambda v: 0 <= v <= 1, "in [0, 1]")
    require("repetition_penalty", lambda v: v > 0, "> 0 and finite")
    require("presence_penalty", lambda v: -2 <= v <= 2, "in [-2, 2]")
    require("frequency_penalty", lambda v: -2 <= v <= 2, "in [-2, 2]")
    require("max_tokens", lambda v: v >= 1, ">= 1")
    require("min_tokens", lambda v: v <= sampling.max_tokens, f"at most max_tokens ({sampling.max_tokens})")
    if sampling.logprobs is not None:
        require("logprobs", lambda v: v <= MAX_LOGPROBS, f"at most {MAX_LOGPROBS}")
    if len(sampling.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(
            f"{field}.stop_token_ids", f"must be at most {MAX_STOP_TOKEN_IDS} ids, got {len(sampling.stop_token_ids)}"
        )
