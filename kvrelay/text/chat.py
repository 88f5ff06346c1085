"""Chat turns -> the text that a model expects. Knows templates and who may speak when; no ids."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvrelay.errors import InvalidRequest
from kvrelay.text.tokenizer import Tokenizer
from kvrelay.text.unicode import utf8

FOLLOWERS = {
    "": ("system", "user"),
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("tool", "assistant"),
}
"""role -> the roles that may come next; "" is the start."""

LAST = ("user", "tool")
"""Whose turn the model may answer."""


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """One message of a chat."""

    role: str
    """"system", "user", "assistant" or "tool"."""
    content: str


def render(tokenizer: Tokenizer, messages: Sequence[ChatTurn]) -> str:
    """The prompt text, generation prompt included; encode it with add_special=False.

    Raises InvalidRequest naming chat.messages[i].role, chat.messages[i].content, or chat.
    """
    check_turns(messages)
    if tokenizer.chat_template is None:
        raise InvalidRequest("chat", "this model has no chat template; send a prompt instead")
    turns = [{"role": turn.role, "content": turn.content} for turn in messages]
    try:
        return _compiled(tokenizer.chat_template).render(
            messages=turns, add_generation_prompt=True, **tokenizer.special_tokens
        )
    except _Refused as refusal:
        raise InvalidRequest("chat", str(refusal)) from None
    except (TemplateError, TypeError, ValueError) as error:
        raise InvalidRequest("chat", f"the model's chat template refuses it: {error}") from error


def check_turns(messages: Sequence[ChatTurn]) -> None:
    """An optional system turn, then user and assistant by turns, tool turns after an assistant's; user or tool last."""
    if not messages:
        raise InvalidRequest("chat.messages", "at least one is needed")
    before = ""
    for i, turn in enumerate(messages):
        if turn.role not in FOLLOWERS or not turn.role:
            raise InvalidRequest(
                f"chat.messages[{i}].role", f"{turn.role!r} is not one of system, user, assistant, tool"
            )
        if turn.role not in FOLLOWERS[before]:
            allowed = " or ".join(FOLLOWERS[before])
            place = f"after {before}" if before else "first"
            raise InvalidRequest(f"chat.messages[{i}].role", f"{turn.role} cannot come {place}; {allowed} can")
        utf8(turn.content, f"chat.messages[{i}].content")
        before = turn.role
    if before not in LAST:
        raise InvalidRequest(f"chat.messages[{len(messages) - 1}].role", f"the last must be user or tool, not {before}")


class _Refused(Exception):
    """A template called raise_exception.

    No clock (strftime_now): templates fall back to a fixed date, so that equal chats are equal prompts.
    """


@lru_cache(maxsize=8)
def _compiled(source: str) -> Template:
    """What Hugging Face's templates rely on: trimmed blocks, loop controls, tojson as is, raise_exception.

    No clock (strftime_now): templates fall back to a fixed date, so that equal chats are equal prompts.
    """
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    return environment.from_string(source)


def _to_json(value: Any, indent: int | None = None) -> str:
    """Jinja's own escapes <, > and &, which templates do not want."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise _Refused(message)
