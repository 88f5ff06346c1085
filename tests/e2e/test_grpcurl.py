"""What a stranger with grpcurl sees of a running cluster."""

import asyncio

import grpc
import pytest

from kvrelay.cli.cluster import Cluster
from tests.e2e.conftest import Router, grpcurl

pytestmark = pytest.mark.asyncio(loop_scope="session")

SERVICES = {
    "router": {"RouterService"},
    "prefill-1": {"PrefillService", "StageService"},
    "relay-1": {"DecodeService", "KvTransferService", "StageService"},
    "main-1": {"DecodeService", "KvTransferService", "StageService"},
    "wan": {"WanService"},
}
GENERATE = "kvrelay.proto.v1.RouterService/Generate"


@pytest.mark.parametrize("name", SERVICES)
async def test_reflection_lists_the_services_of_every_program(town: Cluster, name: str) -> None:
    listed = await grpcurl(town.processes[name].address, "list")
    assert listed.code == 0, listed.err
    ours = {f"kvrelay.proto.v1.{service}" for service in SERVICES[name]}
    assert ours | {"grpc.health.v1.Health"} <= set(listed.out.split())


async def test_reflection_describes_the_public_service(town: Cluster) -> None:
    described = await grpcurl(town.router_address, "describe", "kvrelay.proto.v1.RouterService")
    assert "rpc Generate" in described.out
    assert "returns ( stream .kvrelay.proto.v1.GenerateReply )" in described.out


@pytest.mark.parametrize("name", SERVICES)
async def test_health_check_and_watch_say_serving(town: Cluster, name: str) -> None:
    address = town.processes[name].address
    check, watch = await asyncio.gather(
        grpcurl(address, "grpc.health.v1.Health/Check"),
        grpcurl(address, "grpc.health.v1.Health/Watch", flags=("-max-time", "0.7")),
    )
    assert check.documents() == [{"status": "SERVING"}]
    assert "SERVING" in watch.out
    assert "DeadlineExceeded" in watch.err, "a watch goes on until its caller ends it"


async def test_generate_streams_started_outputs_and_one_completed(town: Cluster, router: Router) -> None:
    asked = {"prompt": "The relay runs", "sampling": {"maxTokens": 9, "seed": 5, "ignoreEos": True}}
    ran = await grpcurl(town.router_address, GENERATE, data=asked)
    assert ran.code == 0, ran.err
    kinds = [next(iter(document)) for document in ran.documents()]
    assert kinds[0] == "started" and kinds[-1] == "completed"
    assert set(kinds[1:-1]) == {"output"}
    completed = ran.documents()[-1]["completed"]
    assert completed["reason"] == "FINISH_REASON_LENGTH"
    assert completed["usage"]["completion_tokens"] == 9
    again = await grpcurl(town.router_address, GENERATE, data=asked)
    assert text_of(again.documents()) == text_of(ran.documents()), "the same seed draws the same text"


def text_of(documents: list[dict[str, dict[str, str]]]) -> str:
    return "".join(str(body.get("text", "")) for document in documents for body in document.values())


async def test_plan_tokenize_and_fleet_answer(town: Cluster, router: Router) -> None:
    service = "kvrelay.proto.v1.RouterService"
    plan = await grpcurl(town.router_address, f"{service}/Plan", data={"prompt": "hello"})
    tokens = await grpcurl(town.router_address, f"{service}/Tokenize", data={"prompt": "hello"})
    fleet = await grpcurl(town.router_address, f"{service}/GetFleet")
    assert plan.documents()[0]["route"]["reason"]
    assert tokens.documents()[0]["ids"]
    assert {stage["info"]["instance_id"] for stage in fleet.documents()[0]["stages"]} == set(town.at.stages)


IDS = {"tokenIds": {"ids": [1, 2, 3]}}
TURNS = [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]
BAD = [
    ({}, "InvalidArgument", "input"),
    ({"prompt": ""}, "InvalidArgument", "prompt"),
    ({"tokenIds": {}}, "InvalidArgument", "token_ids"),
    ({"tokenIds": {"ids": [5_000_000]}}, "InvalidArgument", "token_ids"),
    ({"tokenIds": {"ids": [7] * 5000}}, "InvalidArgument", "token_ids.ids: must be at most 4095"),
    ({"chat": {}}, "InvalidArgument", "chat"),
    ({"chat": {"messages": TURNS}}, "InvalidArgument", "chat.messages"),
    ({"chat": {"messages": [{"role": "king", "content": "a"}]}}, "InvalidArgument", "chat.messages[0].role"),
    ({"prompt": "a" * 5000}, "InvalidArgument", "prompt: must be at most 4095"),
    ({"chat": {"messages": [{"role": "user", "content": "a" * 5000}]}}, "InvalidArgument", "chat.messages: must be at"),
    ({**IDS, "sampling": {"maxTokens": 0}}, "InvalidArgument", "max_tokens"),
    ({**IDS, "sampling": {"maxTokens": 4094}}, "InvalidArgument", "sampling.max_tokens: must be at most 4093"),
    ({**IDS, "sampling": {"maxTokens": 2, "minTokens": 3}}, "InvalidArgument", "sampling.min_tokens"),
    ({**IDS, "sampling": {"stopTokenIds": [264]}}, "InvalidArgument", "sampling.stop_token_ids[0]"),
    ({**IDS, "sampling": {"frequencyPenalty": "NaN"}}, "InvalidArgument", "frequency_penalty"),
    ({**IDS, "stop": [""]}, "InvalidArgument", "stop[0]"),
    ({**IDS, "requestId": "a" * 129}, "InvalidArgument", "request_id"),
    ({**IDS, "pipeline": 99}, "InvalidArgument", "pipeline"),
    ({**IDS, "sampling": {"temperature": -1}}, "InvalidArgument", "temperature"),
    ({**IDS, "sampling": {"temperature": "NaN"}}, "InvalidArgument", "temperature"),
    ({**IDS, "sampling": {"temperature": "Infinity"}}, "InvalidArgument", "temperature"),
    ({**IDS, "sampling": {"topP": 0}}, "InvalidArgument", "top_p"),
    ({**IDS, "sampling": {"minP": 1.5}}, "InvalidArgument", "min_p"),
    ({**IDS, "sampling": {"repetitionPenalty": 0}}, "InvalidArgument", "repetition_penalty"),
    ({**IDS, "sampling": {"presencePenalty": 3}}, "InvalidArgument", "presence_penalty"),
    ({**IDS, "sampling": {"logprobs": 21}}, "InvalidArgument", "logprobs"),
    ({**IDS, "model": "another"}, "NotFound", "another"),
    ({**IDS, "n": 2}, "Unimplemented", "n"),
    ({**IDS, "logitBias": {"3": 1.0}}, "Unimplemented", "logit_bias"),
    ({**IDS, "grammar": "g"}, "Unimplemented", "grammar"),
    ({**IDS, "promptLogprobs": 1}, "Unimplemented", "prompt_logprobs"),
    ({**IDS, "lora": "l"}, "Unimplemented", "lora"),
]


@pytest.mark.parametrize(("asked", "code", "word"), BAD, ids=[f"{word}-{n}" for n, (_, _, word) in enumerate(BAD)])
async def test_bad_input_gets_a_clear_status_at_once(
    town: Cluster, router: Router, asked: dict[str, object], code: str, word: str
) -> None:
    ran = await asyncio.wait_for(grpcurl(town.router_address, GENERATE, data=asked), 5.0)
    assert f"Code: {code}" in ran.err
    assert word in ran.err.split("Message:")[1]


async def test_bytes_that_are_no_request_get_a_status_and_harm_nobody(town: Cluster, router: Router) -> None:
    not_utf8 = b"\x12\x02\xff\xfe"  # field 2 (prompt), two bytes that no UTF-8 text has
    too_big = b"\x12" + b"\x80\x80\xc0\x02" + b"a" * (5 * 1024 * 1024)
    async with grpc.aio.insecure_channel(
        town.router_address, options=[("grpc.max_send_message_length", 16 * 1024 * 1024)]
    ) as channel:
        generate = channel.unary_stream(
            f"/{GENERATE}", request_serializer=lambda raw: raw, response_deserializer=lambda raw: raw
        )
        codes = []
        for raw in (not_utf8, too_big):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                async for _ in generate(raw, timeout=5.0):
                    pass
            codes.append(refused.value.code())
    assert codes[0] is grpc.StatusCode.INVALID_ARGUMENT
    assert codes[1] is grpc.StatusCode.RESOURCE_EXHAUSTED
    ran = await grpcurl(town.router_address, GENERATE, data={**IDS, "sampling": {"maxTokens": 2}})
    assert ran.code == 0, ran.err
