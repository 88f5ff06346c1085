"""Mooncake's JSONL: ms, lengths, and the ids of 512-token prefix blocks. Knows one line at a time."""

import json
import math
from collections.abc import Iterable, Iterator

from kvrelay.load.traces.row import Row, TraceError

BLOCK_TOKENS = 512
FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")


def read(lines: Iterable[str], path: object) -> Iterator[Row]:
    """A row per line; empty lines are passed over. TraceError at the first that is none."""
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield _row(json.loads(line), number)
            except (ValueError, TypeError, OverflowError) as error:
                raise TraceError(path, number, str(error)) from None


def _row(fields: object, line: int) -> Row:
    if not isinstance(fields, dict):
        raise ValueError(f"expected an object with {', '.join(FIELDS)}")
    if missing := [name for name in FIELDS if name not in fields]:
        raise ValueError(f"{missing[0]} is missing")
    at_ms, prompt, output, hashes = (fields[name] for name in FIELDS)
    if not isinstance(at_ms, int | float) or isinstance(at_ms, bool) or not 0 <= at_ms < math.inf:
        raise ValueError(f"timestamp: {at_ms!r} is no time in ms")
    for name, value in (("input_length", prompt), ("output_length", output)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}: {value!r} is no count of tokens")
    if not isinstance(hashes, list) or not all(isinstance(h, int) and h >= 0 for h in hashes):
        raise ValueError("hash_ids: expected a list of whole numbers >= 0")
    if len(hashes) != -(-prompt // BLOCK_TOKENS):
        raise ValueError(f"{len(hashes)} hash_ids for {prompt} tokens; {-(-prompt // BLOCK_TOKENS)} are due")
    return Row(at_ms / 1e3, prompt, output, tuple(hashes), line)
