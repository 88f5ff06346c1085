"""Another server, over real HTTP: times and tokens from its events; what is wrong with it is the record's failure."""

import asyncio
from typing import Any

import pytest

from kvrelay.load.arrival import ClosedLoop
from kvrelay.load.groups import PrefixGroups
from kvrelay.load.hostile import Hostility, Manner
from kvrelay.load.http import Url
from kvrelay.load.lengths import Lengths, Spreading
from kvrelay.load.openai import OpenAiTarget
from kvrelay.load.run import LoadOptions, run_load
from kvrelay.load.target import Reply
from kvrelay.load.workload import Ask
from kvrelay.proto.v1 import router_pb2
from tests.unit.load.completions import EVENTS, OK, Server, chunked, event, serving, token

ASK = Ask("c", 0, (40, 41, 42), 6, 9)


async def asked(server: Server, manner: Manner | None = None, timeout_s: float = 20.0, **target: Any) -> Reply:
    async with serving(server) as url, OpenAiTarget(url, **target).open() as opened:
        return await opened.ask(ASK, manner or Manner(), timeout_s)


async def test_times_and_tokens_come_from_the_events() -> None:
    server = Server(chunked(EVENTS))
    reply = await asked(server, model="m", template=template(0.5))
    record = reply.record
    assert (record.outcome, record.error) == ("ok", "")
    assert reply.ids == (50, 51, 52, 53, 54, 55)
    assert (record.output_tokens, record.prompt_tokens, record.cached_main_tokens) == (6, 3, 2)
    assert (record.request_id, record.finish, record.sources) == ("cmpl-1", "length", "ssssss")
    assert len(record.arrived_ms) == 6 and list(record.arrived_ms) == sorted(record.arrived_ms)
    assert record.ttft_ms is not None and 0 < record.ttft_ms < record.arrived_ms[-1] <= record.e2el_ms
    first, headers, body = server.requests[0]
    assert first == "POST /v1/completions HTTP/1.1"
    assert "authorization" not in headers
    assert (body["prompt"], body["max_tokens"], body["seed"], body["model"]) == ([40, 41, 42], 6, 9, "m")
    assert (body["temperature"], body["stream"]) == (0.5, True)


def template(temperature: float) -> bytes:
    request = router_pb2.GenerateRequest()
    request.sampling.temperature = temperature
    return request.SerializeToString()


async def test_prompts_may_be_words_that_are_equal_where_ids_are() -> None:
    server = Server(chunked(EVENTS))
    reply = await asked(server, as_text=True)
    body = server.requests[0][2]
    assert isinstance(body["prompt"], str) and len(body["prompt"].split()) == 3
    assert "return_token_ids" not in body
    assert reply.record.ok and reply.record.prompt_tokens == 3


async def test_a_key_is_sent_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    server = Server(chunked(EVENTS))
    await asked(server)
    assert server.requests[0][1]["authorization"] == "Bearer k"


async def test_without_ids_and_usage_events_are_counted_and_later_turns_get_stand_ins() -> None:
    text_only = [event({"choices": [{"text": "a"}]}), event({"choices": [{"text": "b", "finish_reason": "stop"}]})]
    reply = await asked(Server(chunked(text_only)))
    assert (reply.record.outcome, reply.record.output_tokens, reply.record.finish) == ("ok", 2, "stop")
    assert len(reply.ids) == 2 and set(reply.ids) <= set(ASK.prompt_ids)


@pytest.mark.parametrize("cut_at", [1, 5, 17])
async def test_events_need_not_come_in_pieces_of_their_own(cut_at: int) -> None:
    stream = b"".join([b": a comment\r\n\r\n", *EVENTS]).replace(b"\n", b"\r\n")
    pieces = [stream[at : at + cut_at] for at in range(0, len(stream), cut_at)]
    assert (await asked(Server(chunked([b"".join(pieces[:9]), *pieces[9:]])))).ids == (50, 51, 52, 53, 54, 55)


async def test_a_body_of_known_length_and_one_that_ends_with_the_connection_are_read() -> None:
    body = b"".join(EVENTS)
    sized = [OK + b"Content-Length: %d\r\n\r\n" % len(body), body]
    assert (await asked(Server(sized))).record.ok
    assert (await asked(Server([OK + b"\r\n", body], closes=True))).record.ok


@pytest.mark.parametrize(
    ("server", "complaint"),
    [
        (Server([b"HTTP/1.1 500 Oops\r\nContent-Length: 4\r\n\r\noops"]), "HTTP 500: oops"),
        (Server([b"HTTP/1.1 401 No\r\nContent-Length: 0\r\n\r\n"]), "HTTP 401"),
        (Server(chunked(EVENTS)[:4], closes=True), "the answer was cut"),
        (Server([OK + b"Content-Length: 9999\r\n\r\n", EVENTS[0]], closes=True), "bytes are missing"),
        (Server(chunked(EVENTS[:3])), "without a finish reason"),
        (Server([OK + b"\r\n", *EVENTS[:3]], closes=True), "without a finish reason"),
        (Server(chunked([event({"error": {"message": "no memory"}})])), "error event: no memory"),
        (Server(chunked([event(b"{")])), "no JSON object"),
        (Server(chunked([event(b"[1]")])), "no JSON object"),
        (Server(chunked([event({"choices": [7]})])), "no completion's"),
        (Server(chunked([event({"choices": 7})])), "no completion's"),
        (Server(chunked([event(token(0, token_ids=["x"]))])), "no completion's"),
        (Server([OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n"]), "no HTTP"),
        (Server([b"SSH-2.0-x\r\n\r\n"]), "no HTTP answer"),
        (Server([], closes=True), "closed before an answer"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_server_that_is_wrong_is_a_failed_request(server: Server, complaint: str) -> None:
    record = (await asked(server)).record
    assert record.outcome == "failed"
    assert complaint in record.error


async def test_silence_beyond_the_time_out_is_a_failure() -> None:
    record = (await asked(Server(chunked(EVENTS)[:3], stalls=True), timeout_s=0.3)).record
    assert (record.outcome, record.error) == ("failed", "no end within 0.3 s")


async def test_a_server_that_is_not_there_is_a_failure() -> None:
    async with OpenAiTarget("http://127.0.0.1:9").open() as opened:
        record = (await opened.ask(ASK, Manner(), 5.0)).record
    assert record.outcome == "failed" and record.error


async def test_a_client_that_leaves_closes_its_connection() -> None:
    server = Server(chunked(EVENTS)[:4], stalls=True)
    async with serving(server) as url, OpenAiTarget(url).open() as opened:
        reply = await opened.ask(ASK, Manner("cancel", leaves_after_s=0.3), 20.0)
        async with asyncio.timeout(5):
            await server.gone.wait()
    assert reply.record.outcome == "cancelled"
    assert reply.ids == (50, 51, 52)[: len(reply.ids)]


async def test_connections_are_used_again_and_one_that_died_meanwhile_is_replaced() -> None:
    server = Server(chunked(EVENTS))
    async with serving(server) as url, OpenAiTarget(url).open() as opened:
        for _ in range(3):
            assert (await opened.ask(ASK, Manner(), 20.0)).record.ok
        assert server.connections == 1
        server.closes = True
        assert (await opened.ask(ASK, Manner(), 20.0)).record.ok
        assert (await opened.ask(ASK, Manner(), 20.0)).record.ok
    assert server.connections in (2, 3)  # the first may have been closed after the third answer already


async def test_a_run_against_it_is_a_run_like_any_other() -> None:
    server = Server(chunked(EVENTS))
    workload = PrefixGroups(1, 5000, 20, Lengths(4, 8), Lengths(6, 6), 2, Lengths(16, 16))
    async with serving(server) as url:
        hostility = Hostility(slow_rate=0.2, slow_pause_s=0.001, cancel_rate=0.2, cancel_s=Spreading(9, 9))
        records = await run_load(LoadOptions(OpenAiTarget(url), workload, ClosedLoop(4), hostility=hostility))
    assert len(records) == 20 and all(record.ok for record in records)
    assert server.connections <= 5


@pytest.mark.parametrize("text", ["", "host:80", "ftp://host", "http://", "http://host:x", "http://host:99999"])
def test_what_is_no_url_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Url.parse(text)


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/"])
async def test_v1_is_added_if_it_is_not_there(path: str) -> None:
    server = Server(chunked(EVENTS))
    async with serving(server) as url, OpenAiTarget(url + path).open() as opened:
        await opened.ask(ASK, Manner(), 20.0)
    assert server.requests[0][0].split()[1] == "/v1/completions"
