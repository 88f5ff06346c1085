"""What a client may ask for, and how it is told what it may not."""

import re
from typing import Any

import pytest

from kvrelay.errors import InvalidRequest
from kvrelay.proto.v1 import common_pb2
from kvrelay.rpc.convert import sampling_from_client, token_ids_from_client
from kvrelay.types import Sampling

NAN, INF = float("nan"), float("inf")


def resolve(prompt_tokens: int = 100, **given: Any) -> Sampling:
    return sampling_from_client(
        common_pb2.Sampling(**given),
        prompt_tokens=prompt_tokens,
        max_model_tokens=1000,
        vocab_size=258,
        draw_seed=lambda: 42,
    )


def test_unset_fields_take_the_documented_defaults() -> None:
    assert resolve() == Sampling(seed=42, max_tokens=900)


def test_zeros_that_a_client_sets_are_not_taken_for_unset() -> None:
    given = resolve(seed=0, temperature=0.0, logprobs=0, min_tokens=0)
    assert (given.seed, given.temperature, given.logprobs) == (0, 0.0, 0)


def test_set_fields_are_kept() -> None:
    sampling = resolve(
        seed=7,
        max_tokens=900,
        min_tokens=900,
        temperature=0.5,
        top_p=1.0,
        top_k=3,
        min_p=1.0,
        repetition_penalty=1.1,
        presence_penalty=-2,
        frequency_penalty=2,
        ignore_eos=True,
        stop_token_ids=[5, 257, 5],
        logprobs=20,
    )
    assert sampling == Sampling(7, 900, 0.5, 1.0, 3, 1.0, 1.1, -2, 2, 900, True, (5, 257), 20)


def test_the_last_token_of_the_context_may_be_asked_for() -> None:
    assert resolve(prompt_tokens=999).max_tokens == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temperature": NAN}, "sampling.temperature: must be >= 0 and finite, got nan"),
        ({"temperature": INF}, "sampling.temperature: must be >= 0 and finite, got inf"),
        ({"temperature": -0.1}, "sampling.temperature: must be >= 0 and finite, got -0.1"),
        ({"top_p": 0.0}, "sampling.top_p: must be in (0, 1], got 0.0"),
        ({"top_p": 1.01}, "sampling.top_p: must be in (0, 1], got 1.01"),
        ({"top_p": NAN}, "sampling.top_p: must be in (0, 1], got nan"),
        ({"min_p": -0.5}, "sampling.min_p: must be in [0, 1], got -0.5"),
        ({"min_p": NAN}, "sampling.min_p: must be in [0, 1], got nan"),
        ({"repetition_penalty": 0.0}, "sampling.repetition_penalty: must be > 0 and finite, got 0.0"),
        ({"repetition_penalty": INF}, "sampling.repetition_penalty: must be > 0 and finite, got inf"),
        ({"presence_penalty": 2.5}, "sampling.presence_penalty: must be in [-2, 2], got 2.5"),
        ({"frequency_penalty": NAN}, "sampling.frequency_penalty: must be in [-2, 2], got nan"),
        ({"frequency_penalty": -INF}, "sampling.frequency_penalty: must be in [-2, 2], got -inf"),
        ({"max_tokens": 0}, "sampling.max_tokens: must be >= 1, got 0"),
        (
            {"max_tokens": 901},
            "sampling.max_tokens: must be at most 900 (max_model_tokens 1000 - prompt 100), got 901",
        ),
        ({"max_tokens": 5, "min_tokens": 6}, "sampling.min_tokens: must be at most max_tokens (5), got 6"),
        ({"logprobs": 21}, "sampling.logprobs: must be at most 20, got 21"),
        ({"stop_token_ids": range(65)}, "sampling.stop_token_ids: must be at most 64 ids, got 65"),
        (
            {"stop_token_ids": [3, 258]},
            "sampling.stop_token_ids[1]: must be a token id below 258 (vocabulary), got 258",
        ),
        ({"prompt_tokens": 1000}, "prompt: must be at most 999 tokens (max_model_tokens - 1), got 1000"),
    ],
)
def test_a_bad_value_is_refused_with_its_field_and_limit(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{re.escape(message)}$"):
        resolve(**given)


def test_token_ids_outside_the_vocabulary_are_named_by_their_place() -> None:
    assert token_ids_from_client([0, 257], vocab_size=258, field="token_ids.ids") == [0, 257]
    assert token_ids_from_client([], vocab_size=258, field="token_ids.ids") == []
    with pytest.raises(InvalidRequest, match=r"token_ids\.ids\[1\]: must be a token id below 258"):
        token_ids_from_client([1, 300, 400], vocab_size=258, field="token_ids.ids")
