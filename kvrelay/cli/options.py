"""Flags that several commands have, and the request that they describe. Knows the router's protos; sends nothing."""

import enum
from dataclasses import dataclass
from typing import Annotated

import typer

from kvrelay.load.client import HANDOFF_MODES, PIPELINES
from kvrelay.proto.v1 import common_pb2, router_pb2
from kvrelay.types import HandoffMode, Pipeline
from kvrelay.wan.settings import parse_rate

Router = Annotated[str, typer.Option(help="host:port of the router.")]
MaxTokens = Annotated[int, typer.Option(help="Output tokens at most.")]
Temperature = Annotated[float | None, typer.Option(help="0 = greedy.")]
TopP = Annotated[float | None, typer.Option("--top-p")]
TopK = Annotated[int | None, typer.Option("--top-k", help="0 = off.")]
MinP = Annotated[float | None, typer.Option("--min-p")]
RepetitionPenalty = Annotated[float | None, typer.Option(help="Over prompt and output.")]
PresencePenalty = Annotated[float | None, typer.Option(help="Over output.")]
FrequencyPenalty = Annotated[float | None, typer.Option(help="Over output.")]
Seed = Annotated[int | None, typer.Option(help="Drawn by the router if not given.")]
MinTokens = Annotated[int | None, typer.Option()]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos")]
StopStrings = Annotated[list[str] | None, typer.Option("--stop", help="Stop string; may be repeated.", metavar="TEXT")]
StopIds = Annotated[list[int] | None, typer.Option("--stop-id", help="Stop token; may be repeated.", metavar="ID")]
Forced = Annotated[
    Pipeline | None, typer.Option("--pipeline", help="Force p-md, p-rld-md, p-rld or md.", metavar="NAME")
]
Handoff = Annotated[
    HandoffMode | None, typer.Option("--handoff-mode", help="Force one-shot, catch-up or dynamic.", metavar="MODE")
]
Salt = Annotated[str, typer.Option("--cache-salt", help="KV is shared among equal salts only.")]
Timeout = Annotated[float, typer.Option("--timeout", help="Seconds.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object instead.")]

WanRate = Annotated[
    str, typer.Option(help="Of each direction.", metavar="RATE", callback=lambda text: checked_rate(text))
]
WanDelay = Annotated[float, typer.Option(help="One way.", min=0, metavar="MS")]

DEFAULT_ROUTER = "127.0.0.1:50050"


def checked_rate(text: str) -> str:
    """The text, if it is a rate. typer.BadParameter otherwise."""
    try:
        parse_rate(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return text


class Form(enum.StrEnum):
    """What a prompt argument is."""

    TEXT = "text"
    CHAT = "chat"
    IDS = "ids"


@dataclass(frozen=True, slots=True)
class Input:
    """A prompt as it stands on the command line."""

    prompt: str
    form: Form = Form.TEXT
    system: str = ""

    def put(self, request: router_pb2.GenerateRequest) -> None:
        """Sets the request's input. typer.BadParameter if the ids are no numbers."""
        if self.form is Form.CHAT:
            if self.system:
                request.chat.messages.add(role="system", content=self.system)
            request.chat.messages.add(role="user", content=self.prompt)
        elif self.form is Form.IDS:
            try:
                request.token_ids.ids.extend(int(part) for part in self.prompt.replace(",", " ").split())
            except ValueError as error:
                raise typer.BadParameter(f"--ids wants token ids, such as 1,2,3: {error}") from None
        else:
            request.prompt = self.prompt


def sampling(**wanted: object) -> common_pb2.Sampling:
    """The message with those fields that are not None set. typer.BadParameter if a value does not fit its field."""
    message = common_pb2.Sampling()
    for name, value in wanted.items():
        if value is None:
            continue
        try:
            if isinstance(value, list):
                getattr(message, name).extend(value)
            else:
                setattr(message, name, value)
        except (ValueError, TypeError) as error:
            raise typer.BadParameter(f"--{name.replace('_', '-')}: {error}") from None
    return message


def forced(request: router_pb2.GenerateRequest, pipeline: Pipeline | None, handoff: HandoffMode | None) -> None:
    """Sets what the user forces."""
    if pipeline is not None:
        request.pipeline = next(number for number, name in PIPELINES.items() if name == pipeline)
    if handoff is not None:
        request.handoff_mode = next(number for number, name in HANDOFF_MODES.items() if name == handoff)
