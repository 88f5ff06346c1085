"""Chats become the text that the model was trained on; a wrong order of roles is named."""

import pytest

from kvrelay.errors import InvalidRequest
from kvrelay.text.chat import ChatTurn, render
from kvrelay.text.tiny import TinyTokenizer
from kvrelay.text.tokenizer import Tokenizer, load_tokenizer


def turns(*roles: str) -> list[ChatTurn]:
    return [ChatTurn(role, f"{role} {i}") for i, role in enumerate(roles)]


def with_template(source: str | None) -> Tokenizer:
    tokenizer = TinyTokenizer()
    tokenizer.chat_template = source  # type: ignore[assignment]
    return tokenizer


def test_smollm2_gets_its_default_system_turn() -> None:
    assert render(load_tokenizer("smollm2"), [ChatTurn("user", "Hi {{ 1 }}")]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi {{ 1 }}<|im_end|>\n<|im_start|>assistant\n"
    )


def test_smollm2_equals_the_reference_renderer() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    tokenizer = load_tokenizer("smollm2")
    chat = [
        ChatTurn("system", "Be brief."),
        ChatTurn("user", "a\n<b>"),
        ChatTurn("assistant", "é"),
        ChatTurn("user", ""),
    ]
    raw = [{"role": turn.role, "content": turn.content} for turn in chat]
    wanted, _ = render_jinja_template([raw], chat_template=tokenizer.chat_template, add_generation_prompt=True)
    assert render(tokenizer, chat) == wanted[0]


@pytest.mark.parametrize(
    "roles",
    [
        ("user",),
        ("system", "user"),
        ("user", "assistant", "user"),
        ("system", "user", "assistant", "tool"),
        ("user", "assistant", "tool", "tool", "assistant", "user"),
    ],
)
def test_these_orders_are_good(roles: tuple[str, ...]) -> None:
    assert render(TinyTokenizer(), turns(*roles)).endswith("<end><assistant>")


@pytest.mark.parametrize(
    ("roles", "field"),
    [
        ((), "chat.messages"),
        (("assistant",), "chat.messages[0].role"),
        (("tool",), "chat.messages[0].role"),
        (("system",), "chat.messages[0].role"),
        (("user", "assistant"), "chat.messages[1].role"),
        (("user", "user"), "chat.messages[1].role"),
        (("user", "system"), "chat.messages[1].role"),
        (("system", "assistant", "user"), "chat.messages[1].role"),
        (("user", "assistant", "assistant", "user"), "chat.messages[2].role"),
        (("user", "assistant", "tool", "user"), "chat.messages[3].role"),
        (("user", "narrator"), "chat.messages[1].role"),
        (("",), "chat.messages[0].role"),
        (("User",), "chat.messages[0].role"),
    ],
)
def test_the_first_wrong_role_is_named(roles: tuple[str, ...], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        render(TinyTokenizer(), turns(*roles))
    assert refused.value.field == field


def test_content_that_is_not_unicode_is_named() -> None:
    with pytest.raises(InvalidRequest, match=r"chat.messages\[0\].content: not valid Unicode at character 1"):
        render(TinyTokenizer(), [ChatTurn("user", "a\ud800")])


def test_a_model_without_a_template_says_so() -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        render(with_template(None), turns("user"))


def test_a_template_may_refuse_a_chat() -> None:
    tokenizer = with_template("{{ raise_exception('no system turn here') }}")
    with pytest.raises(InvalidRequest, match="chat: no system turn here"):
        render(tokenizer, turns("system", "user"))


@pytest.mark.parametrize(
    "source", ["{% if %}", "{{ messages[5].content }}", "{{ 1 + 'a' }}", "{{ ''.__class__.__mro__ }}"]
)
def test_a_broken_template_is_an_error_of_the_chat_not_a_crash(source: str) -> None:
    with pytest.raises(InvalidRequest, match="chat: the model's chat template refuses it"):
        render(with_template(source), turns("user"))


def test_templates_find_what_hugging_face_gives_them() -> None:
    source = (
        "{%- for message in messages %}\n  {% if loop.index > 1 %}{% break %}{% endif %}\n"
        "{{ message | tojson }}{{ bos_token }}\n{%- endfor %}"
    )
    assert render(with_template(source), [ChatTurn("user", "<é>")]) == '{"role": "user", "content": "<é>"}<bos>'
