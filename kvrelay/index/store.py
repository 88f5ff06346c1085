"""How the index lies in Redis: keys, the description's JSON, connections. Asks and writes nothing by itself.

<prefix>instances                      SET   of incarnations, <id>:<epoch>, that have announced and were not cleared yet
<prefix>instance:<id>                  HASH  epoch, sequence, description (JSON), scoring (the epoch, once its cache is
                                             announced in full); TTL renewed by heartbeats
<prefix>held:<id>:<epoch>:<bucket>     HASH  block hash (16 bytes) -> nothing; 1024 buckets, by a hash's first 10 bits

Redis keeps a hash of up to 512 short fields in one piece: ~22 bytes a block, where an entry of its own costs ~90. So an
instance of up to half a million blocks stays small; a larger one only costs more.
"""

import dataclasses
import json
from typing import Any, TypeAlias

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from kvrelay.types import LayoutFingerprint, Role, StageDescription

PREFIX = "kvrelay:"

INSTANCES = f"{PREFIX}instances"

Client: TypeAlias = redis.asyncio.Redis
"""Replies are bytes."""


def instance_key(instance_id: str) -> str:
    """Who it is, and that it lives."""
    return f"{PREFIX}instance:{instance_id}"


def incarnation(instance_id: str, epoch: int) -> str:
    """One process under this id. Epochs have no colon, ids may."""
    return f"{instance_id}:{epoch}"


def held_key(instance_id: str, epoch: int, block_hash: bytes) -> bytes:
    """The bucket in which this incarnation's entry of the block is, if it holds it. `LUA` says the same."""
    return f"{PREFIX}held:{instance_id}:{epoch}:".encode() + bytes((block_hash[0], block_hash[1] & 0xC0))


LUA = """
    local function bucket(hash)
      local first, second = string.byte(hash, 1, 2)
      return string.char(first, second - second % 64)
    end
    """
"""For the scripts: the last two bytes of a bucket's key."""


def connect(url: str, *, timeout_s: float) -> Client:
    """A client that tries everything once: who calls knows what a failure means. `timeout_s` is that of connecting.

    ValueError: not a Redis URL.
    """
    return redis.asyncio.Redis.from_url(
        url,
        # Callers bound their calls. With a time-out here redis-py sends inside asyncio.wait_for, which on Python 3.11
        # can lose a cancellation: a look-up then waits on for this time-out, not for its own.
        socket_timeout=None,
        socket_connect_timeout=timeout_s,
        socket_keepalive=True,
        retry=Retry(NoBackoff(), 0),
        # RESP2 and no client info: connecting costs no round trip of its own.
        protocol=2,
        driver_info=None,
    )


def description_to_json(description: StageDescription) -> str:
    """All fields."""
    return json.dumps(dataclasses.asdict(description))


def description_from_json(text: bytes) -> StageDescription:
    """ValueError: written by a version that this one does not understand."""
    try:
        fields: dict[str, Any] = json.loads(text)
        fields["role"] = Role(fields["role"])
        fields["layout"] = LayoutFingerprint(**fields["layout"])
        fields["eos_token_ids"] = tuple(fields["eos_token_ids"])
        return StageDescription(**fields)
    except (KeyError, TypeError, AttributeError) as exc:
        raise ValueError(f"not a stage description of this version: {exc!r}") from exc
