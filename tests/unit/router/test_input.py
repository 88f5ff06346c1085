"""Bad input gets an error that names the field and the limit, before anything is asked of a stage."""

import pytest

from kvrelay.errors import InvalidRequest, KvrelayError, NotServed, Unsupported
from kvrelay.kvcache.hashing import block_hashes, root_hash
from kvrelay.proto.v1 import common_pb2, router_pb2
from kvrelay.text.tokenizer import load_tokenizer
from services.router.input import Reader, Served
from tests.fakes_stages import LAYOUT

SERVED = Served(frozenset({"tiny"}), 264, 100, (257,), LAYOUT, root_hash(LAYOUT))


def reader() -> Reader:
    return Reader(load_tokenizer("tiny"), long_chars=1000, max_chars=5000)


def ids(*values: int) -> router_pb2.TokenIds:
    return router_pb2.TokenIds(ids=values)


def chat(*turns: tuple[str, str]) -> router_pb2.Chat:
    return router_pb2.Chat(messages=[router_pb2.ChatMessage(role=role, content=text) for role, text in turns])


Request = router_pb2.GenerateRequest


@pytest.mark.parametrize(
    ("request_", "error", "text"),
    [
        (Request(), InvalidRequest, "input: exactly one of prompt, chat, token_ids"),
        (Request(prompt=""), InvalidRequest, "prompt: must not be empty"),
        (Request(token_ids=ids()), InvalidRequest, "token_ids.ids: must not be empty"),
        (Request(token_ids=ids(5, 264)), InvalidRequest, r"token_ids.ids\[1\]: .*below 264.*got 264"),
        (Request(token_ids=ids(*[1] * 100)), InvalidRequest, "token_ids.ids: must be at most 99 tokens.*got 100"),
        (Request(prompt="x" * 100), InvalidRequest, "prompt: must be at most 99 tokens"),
        (Request(chat=chat(("user", "x" * 100))), InvalidRequest, "chat.messages: must be at most 99 tokens"),
        (Request(prompt="x" * 6000), InvalidRequest, "prompt: must be at most 5000 characters, got 6000"),
        (Request(prompt="x", model="gpt"), NotServed, "model: 'gpt' is not served; tiny is"),
        (Request(prompt="x", n=2), Unsupported, "n: only 1 is supported, got 2"),
        (Request(prompt="x", logit_bias={1: 0.5}), Unsupported, "logit_bias"),
        (Request(prompt="x", grammar="a"), Unsupported, "grammar"),
        (Request(prompt="x", lora="a"), Unsupported, "lora"),
        (Request(prompt="x", prompt_logprobs=0), Unsupported, "prompt_logprobs"),
        (Request(prompt="x", stop=["a"] * 17), InvalidRequest, "stop: must be at most 16 strings, got 17"),
        (Request(prompt="x", stop=[""]), InvalidRequest, r"stop\[0\]: must have 1 to 256 characters"),
        (Request(prompt="x", stop=["a"], return_text=False), InvalidRequest, "stop: .*return_text is false"),
        (Request(prompt="x", request_id="a" * 129), InvalidRequest, "request_id: must be at most 128"),
        (Request(prompt="x", pipeline=99), InvalidRequest, "pipeline"),
        (Request(prompt="x", handoff_mode=99), InvalidRequest, "handoff_mode"),
        (Request(chat=chat(("assistant", "hi"))), InvalidRequest, r"chat.messages\[0\].role"),
        (Request(chat=chat()), InvalidRequest, "chat.messages: at least one"),
        (Request(prompt="x", sampling=common_pb2.Sampling(max_tokens=0)), InvalidRequest, "sampling.max_tokens"),
        (
            Request(prompt="x", sampling=common_pb2.Sampling(temperature=float("nan"))),
            InvalidRequest,
            "sampling.temperature",
        ),
        (Request(prompt="x", sampling=common_pb2.Sampling(temperature=-1)), InvalidRequest, "sampling.temperature"),
        (Request(prompt="x", sampling=common_pb2.Sampling(max_tokens=1000)), InvalidRequest, "sampling.max_tokens"),
    ],
)
async def test_bad_input_is_refused_by_field(request_: Request, error: type[KvrelayError], text: str) -> None:
    with pytest.raises(error, match=text):
        await reader().read(request_, SERVED)


async def test_defaults_are_filled_in_and_the_seed_is_fixed() -> None:
    ask = await reader().read(Request(token_ids=ids(*range(40))), SERVED)
    assert ask.sampling.max_tokens == 60
    assert 0 <= ask.sampling.seed < 2**64
    assert ask.request_id
    assert ask.return_text
    assert ask.hashes == tuple(block_hashes(root_hash(LAYOUT, ""), range(40), 16))
    again = await reader().read(Request(token_ids=ids(*range(40))), SERVED)
    assert again.sampling.seed != ask.sampling.seed
    assert again.request_id != ask.request_id


async def test_another_salt_gives_other_block_hashes() -> None:
    one = await reader().read(Request(token_ids=ids(*range(40)), cache_salt="a"), SERVED)
    two = await reader().read(Request(token_ids=ids(*range(40)), cache_salt="b"), SERVED)
    assert set(one.hashes).isdisjoint(two.hashes)


async def test_long_text_is_tokenized_off_the_loop_with_the_same_result() -> None:
    served = Served(frozenset({"tiny"}), 264, 10_000, (257,), LAYOUT, root_hash(LAYOUT))
    text = "abcd" * 600
    long = await reader().read(Request(prompt=text), served)
    assert list(long.prompt_ids) == load_tokenizer("tiny").encode(text)
