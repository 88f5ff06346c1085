"""Flags become a request; those that are not given are not set."""

import pytest
import typer

from kvrelay.cli.options import Form, Input, checked_rate, forced, sampling
from kvrelay.cli.up import pairs
from kvrelay.proto.v1 import router_pb2
from kvrelay.types import HandoffMode, Pipeline


def test_flags_that_are_not_given_stay_unset() -> None:
    message = sampling(temperature=0.0, top_k=None, stop_token_ids=[3, 4])
    assert message.HasField("temperature") and message.temperature == 0.0
    assert not message.HasField("top_k")
    assert list(message.stop_token_ids) == [3, 4]


def test_a_value_that_its_field_cannot_hold_is_named() -> None:
    with pytest.raises(typer.BadParameter, match="--top-k"):
        sampling(top_k=-1)


def test_a_prompt_is_text_a_chat_or_ids() -> None:
    text, chat, ids = (router_pb2.GenerateRequest() for _ in range(3))
    Input("hello").put(text)
    Input("hello", Form.CHAT, "be kind").put(chat)
    Input("1, 2 3", Form.IDS).put(ids)
    assert text.prompt == "hello"
    assert [(message.role, message.content) for message in chat.chat.messages] == [
        ("system", "be kind"),
        ("user", "hello"),
    ]
    assert list(ids.token_ids.ids) == [1, 2, 3]


def test_ids_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(typer.BadParameter, match="--ids"):
        Input("one", Form.IDS).put(router_pb2.GenerateRequest())


def test_every_pipeline_and_mode_can_be_forced() -> None:
    for pipeline in Pipeline:
        for mode in HandoffMode:
            request = router_pb2.GenerateRequest()
            forced(request, pipeline, mode)
            assert request.pipeline and request.handoff_mode


def test_a_rate_is_checked_before_anything_starts() -> None:
    assert checked_rate("40mbit") == "40mbit"
    with pytest.raises(typer.BadParameter, match="fast"):
        checked_rate("fast")


def test_settings_are_key_value_pairs() -> None:
    assert pairs("--stage-set", ["relay.pace=fixed=5,token=1"]) == (("relay.pace", "fixed=5,token=1"),)
    with pytest.raises(typer.BadParameter, match="KEY=VALUE"):
        pairs("--stage-set", ["pace"])
