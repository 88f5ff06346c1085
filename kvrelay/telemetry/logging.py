"""Log lines: one form for people, one for machines, the request id on every line of a request. Knows no service."""

import json
import logging
import sys
import time
from contextvars import ContextVar
from typing import Any, TextIO

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""The request that the current task works for; empty: none. Tasks started from it inherit it."""

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "request_id", "taskName"}
_QUIET = ("asyncio", "grpc", "redis", "matplotlib", "uvloop")
"""Loggers of libraries, of which only warnings are worth a line."""


def configure(level: str = "info", format: str = "text", *, stream: TextIO | None = None) -> None:
    """Log to `stream` (stderr), and nowhere else. Calling it again replaces what was set before.

    ValueError: an unknown level or format.
    """
    if level.lower() not in LEVELS:
        raise ValueError(f"log_level: must be one of {', '.join(LEVELS)}, got {level!r}")
    if format not in FORMATS:
        raise ValueError(f"log_format: must be one of {', '.join(FORMATS)}, got {format!r}")
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.addFilter(_add_request_id)
    handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter())
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)


def bind_request_id(value: str) -> None:
    """From here on the current task works for request `value`. In an RPC handler: its task is the request's own, so
    that the line of an error that leaves the handler has the id too.
    """
    request_id.set(value)


def _add_request_id(record: logging.LogRecord) -> bool:
    if not hasattr(record, "request_id"):
        record.request_id = request_id.get()
    return True


def _extras(record: logging.LogRecord) -> dict[str, Any]:
    fields = vars(record)
    if _STANDARD.issuperset(fields):
        return {}
    return {name: value for name, value in fields.items() if name not in _STANDARD}


def _timestamp(record: logging.LogRecord) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"


class TextFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.123Z INFO    kvrelay.rpc.server [request id] message key=value`."""

    def format(self, record: logging.LogRecord) -> str:
        """Part of logging.Formatter."""
        request = getattr(record, "request_id", "")
        parts = [_timestamp(record), f"{record.levelname:7}", record.name]
        if request:
            parts.append(f"[{request}]")
        parts.append(record.getMessage())
        parts += [f"{name}={value}" for name, value in _extras(record).items()]
        line = " ".join(parts)
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class JsonFormatter(logging.Formatter):
    """One object a line: at, level, logger, request_id, message, what `extra` gave, and error with the traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """Part of logging.Formatter."""
        entry: dict[str, Any] = {
            "at": _timestamp(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "request_id": getattr(record, "request_id", ""),
            "message": record.getMessage(),
            **_extras(record),
        }
        if record.exc_info:
            entry["error"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str, ensure_ascii=False)
