"""The same load against any server with OpenAI's /v1/completions, streaming. Knows that API, and no stages.

Prompts are sent as token ids, or as a word per id. A server that does not return the answer's ids (vLLM does, when
asked) gets stand-ins for them in later turns: equal in number, so lengths hold, but its cache cannot hit on them.
"""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from kvrelay.load.hostile import Manner
from kvrelay.load.http import HttpClient, HttpError, Url
from kvrelay.load.ids import FIRST_ID, dice
from kvrelay.load.record import Record
from kvrelay.load.target import Reply
from kvrelay.load.workload import Ask
from kvrelay.proto.v1 import common_pb2, router_pb2

KEY = "OPENAI_API_KEY"


@dataclass(frozen=True, slots=True)
class OpenAiTarget:
    """A server, and the model it is asked for."""

    url: str
    """ "http://host:8000", with or without /v1."""
    model: str = ""
    template: bytes = b""
    """A serialized GenerateRequest, of which the sampling is used."""
    as_text: bool = False
    """Prompts are words, for servers that take no ids: about one token each, and the server's usage says how many."""

    @asynccontextmanager
    async def open(self) -> AsyncIterator["OpenOpenAi"]:
        """See Target. ValueError: the URL is none."""
        url = Url.parse(self.url)
        path = url.path if url.path.endswith("/v1") else f"{url.path}/v1"
        key = os.environ.get(KEY)
        client = HttpClient(replace(url, path=path), {"Authorization": f"Bearer {key}"} if key else {})
        try:
            sampling = router_pb2.GenerateRequest.FromString(self.template).sampling
            yield OpenOpenAi(client, self.model, sampling, self.as_text)
        finally:
            await client.close()


@dataclass(slots=True)
class Heard:
    """What came so far."""

    sent_at_s: float
    request_id: str = ""
    arrived_ms: list[float] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    finish: str = ""
    usage: Mapping[str, Any] = field(default_factory=dict)
    done: bool = False
    """[DONE] came."""

    def take(self, data: bytes) -> None:
        """One event's data. HttpError: the server reports an error, or it is no JSON object."""
        if data == b"[DONE]":
            self.done = True
            return
        try:
            event = json.loads(data)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            raise HttpError(f"an event that is no JSON object: {data[:80]!r}")
        if error := event.get("error"):
            raise HttpError(f"error event: {error.get('message', error) if isinstance(error, dict) else error}")
        self.request_id = self.request_id or str(event.get("id", ""))
        try:
            self.usage = dict(event.get("usage") or self.usage)
            for choice in event.get("choices") or ():
                self._take_choice(choice)
        except (AttributeError, TypeError, ValueError):
            raise HttpError(f"an event that is no completion's: {data[:80]!r}") from None

    def _take_choice(self, choice: Mapping[str, Any]) -> None:
        ids = [int(token) for token in choice.get("token_ids") or ()]
        self.ids += ids
        count = len(ids) or int(bool(choice.get("text")))
        now_ms = (time.perf_counter() - self.sent_at_s) * 1e3
        self.arrived_ms += [now_ms] * count
        self.finish = str(choice.get("finish_reason") or self.finish)


class OpenOpenAi:
    """A server's connections."""

    def __init__(self, client: HttpClient, model: str, sampling: common_pb2.Sampling, as_text: bool = False) -> None:
        self._client = client
        self._as_text = as_text
        self._model = model
        self._sampling = sampling

    async def ask(self, ask: Ask, manner: Manner, timeout_s: float) -> Reply:
        """See OpenTarget."""
        body = json.dumps(self._body(ask)).encode()
        heard = Heard(time.perf_counter())
        error, left = "", False
        leave_s = timeout_s if manner.leaves_after_s is None else min(manner.leaves_after_s, timeout_s)
        try:
            async with asyncio.timeout(leave_s):
                await self._listen(body, heard, manner.pause_s)
        except TimeoutError:
            left = manner.leaves_after_s is not None and leave_s == manner.leaves_after_s
            error = "" if left else f"no end within {timeout_s:g} s"
        except (HttpError, OSError) as failed:
            error = str(failed) or type(failed).__name__
        e2el_ms = (time.perf_counter() - heard.sent_at_s) * 1e3
        outcome = "failed" if error else "cancelled" if left else "ok"
        record = replace(record_of(heard, ask), outcome=outcome, error=error, e2el_ms=e2el_ms)
        return Reply(record, tuple(heard.ids) or stand_ins(ask, record.output_tokens), heard.sent_at_s)

    async def _listen(self, body: bytes, heard: Heard, pause_s: float) -> None:
        async with self._client.post("/completions", body) as lines:
            async for line in lines:
                if line.startswith(b"data:"):
                    heard.take(line[5:].strip())
                    if pause_s:
                        await asyncio.sleep(pause_s)
        if not (heard.done or heard.finish):
            raise HttpError("the stream was cut: it ended without a finish reason and without [DONE]")

    def _body(self, ask: Ask) -> dict[str, Any]:
        body: dict[str, Any] = {
            "prompt": text_of(ask.prompt_ids) if self._as_text else list(ask.prompt_ids),
            "max_tokens": ask.max_tokens,
            "seed": ask.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if not self._as_text:
            body["return_token_ids"] = True
        if self._model:
            body["model"] = self._model
        for name in ("temperature", "top_p", "ignore_eos"):
            if self._sampling.HasField(name):
                body[name] = getattr(self._sampling, name)
        return body


def record_of(heard: Heard, ask: Ask) -> Record:
    """Flattens what was heard. Tokens are counted by the server's usage, if it says; else by events."""
    output = _count(heard.usage, "completion_tokens") or len(heard.arrived_ms)
    return Record(
        conversation=ask.conversation,
        turn=ask.turn,
        outcome="ok",
        request_id=heard.request_id,
        manner=ask.manner,
        prompt_tokens=_count(heard.usage, "prompt_tokens") or len(ask.prompt_ids),
        wanted_tokens=ask.max_tokens,
        output_tokens=output,
        finish=heard.finish,
        cached_main_tokens=_count(heard.usage.get("prompt_tokens_details"), "cached_tokens"),
        arrived_ms=tuple(heard.arrived_ms),
        sources="s" * output,
        seed=ask.seed,
    )


def _count(usage: object, name: str) -> int:
    """0 if the server does not say."""
    value = usage.get(name) if isinstance(usage, Mapping) else None
    return value if isinstance(value, int) and value >= 0 else 0


def stand_ins(ask: Ask, count: int) -> tuple[int, ...]:
    """Ids in place of an answer whose own are not known; from the prompt's, so that they are in the vocabulary."""
    chance = dice(ask.seed, "stand-in", ask.turn)
    pool = ask.prompt_ids or (FIRST_ID,)
    return tuple(pool[int(place)] for place in chance.integers(len(pool), size=count))


TEXT = """
time year people way day man thing woman life child world school state family student group country problem hand part
place case week company system program question work number night point home water room mother area money story fact
month lot right study book eye job word business issue side kind head house service friend father power hour game
line end member law car city name team minute idea body back parent face level office door health person art war
"""
WORDS = tuple(TEXT.split())


def text_of(ids: Sequence[int]) -> str:
    """A word per id: equal ids give equal text, so what prompts share stays shared."""
    return " ".join(WORDS[token % len(WORDS)] for token in ids)
