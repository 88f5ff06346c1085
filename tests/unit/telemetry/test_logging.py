"""Log lines: the request id on each, one line for machines, libraries kept quiet."""

import asyncio
import io
import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvrelay.telemetry.logging import bind_request_id, configure, request_id


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def configured(level: str, form: str) -> io.StringIO:
    stream = io.StringIO()
    configure(level, form, stream=stream)
    return stream


@contextmanager
def under(value: str) -> Iterator[None]:
    token = request_id.set(value)
    try:
        yield
    finally:
        request_id.reset(token)


def test_a_text_line_has_time_level_name_request_message_and_extras() -> None:
    stream = configured("info", "text")
    with under("r1"):
        logging.getLogger("kvrelay.x").info("hello %s", "world", extra={"blocks": 3})
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO    kvrelay\.x \[r1\] hello world blocks=3\n", stream.getvalue()
    )


def test_a_json_line_is_one_object_even_with_a_traceback() -> None:
    stream = configured("debug", "json")
    with under("r2"):
        try:
            raise KeyError("lost\nline")
        except KeyError:
            logging.getLogger("kvrelay.x").exception("failed", extra={"peer": "p1"})
    [line] = stream.getvalue().splitlines()
    entry = json.loads(line)
    assert (entry["request_id"], entry["level"], entry["message"], entry["peer"]) == ("r2", "error", "failed", "p1")
    assert "KeyError" in entry["error"]


def test_outside_of_requests_there_is_no_id() -> None:
    stream = configured("info", "text")
    logging.getLogger("kvrelay.x").info("up")
    assert "[" not in stream.getvalue()


async def test_each_task_logs_under_its_own_request_and_its_children_inherit_it() -> None:
    stream = configured("info", "json")
    both_bound = asyncio.Barrier(2)

    async def child(name: str) -> None:
        logging.getLogger("kvrelay.x").info(name)

    async def handler(name: str) -> None:
        bind_request_id(name)
        await both_bound.wait()
        async with asyncio.TaskGroup() as group:
            group.create_task(child(name))

    async with asyncio.TaskGroup() as group:
        group.create_task(handler("r1"))
        group.create_task(handler("r2"))
    entries = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert sorted(entry["message"] for entry in entries) == ["r1", "r2"]
    assert all(entry["message"] == entry["request_id"] for entry in entries)
    assert request_id.get() == ""


def test_configuring_again_replaces_and_never_doubles_lines() -> None:
    configured("info", "text")
    stream = configured("warning", "text")
    logging.getLogger("kvrelay.x").info("hidden")
    logging.getLogger("kvrelay.x").warning("shown")
    logging.getLogger("asyncio").info("hidden too")
    assert len(stream.getvalue().splitlines()) == 1


@pytest.mark.parametrize(("level", "form", "field"), [("loud", "text", "log_level"), ("info", "xml", "log_format")])
def test_an_unknown_level_or_format_is_refused_by_name(level: str, form: str, field: str) -> None:
    with pytest.raises(ValueError, match=f"{field}: must be one of"):
        configure(level, form)
