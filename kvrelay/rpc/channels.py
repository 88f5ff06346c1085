"""How this suite dials: keep-alive, limits, one connection per channel. Knows no service."""

import enum
from typing import Any

import grpc

from kvrelay.rpc.address import split_address

MESSAGE_LIMIT_BYTES = 4 * 1024 * 1024 + 64 * 1024
"""4 MiB of content and room for its headers; larger messages are RESOURCE_EXHAUSTED by gRPC itself."""

KEEPALIVE_MS = 5_000
"""A silent connection is pinged after this, and given up after the same time without an answer."""

COMMON_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.max_receive_message_length", MESSAGE_LIMIT_BYTES),
    ("grpc.max_send_message_length", MESSAGE_LIMIT_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_MS),
    # A keep-alive ping is a ping: without this it waits for its answer a minute, whatever the line above says.
    # It waits behind bulk data: what KV senders have in flight must cross in less (kvrelay/transfer/window.py).
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_MS),
    # Idle connections too: kept-open KV lanes must be known dead before the next transfer, not by it.
    ("grpc.keepalive_permit_without_calls", 1),
    # 0 = no limit: a prefill may be silent for minutes while pings go on.
    ("grpc.http2.max_pings_without_data", 0),
)

_CLIENT_OPTIONS: tuple[tuple[str, Any], ...] = (
    *COMMON_OPTIONS,
    # Channels to one address must not share a connection: a big message delays the tokens behind it.
    ("grpc.use_local_subchannel_pool", 1),
    # The router decides what is tried again, and where.
    ("grpc.enable_retries", 0),
    # Stages are dialled directly, whatever http_proxy says.
    ("grpc.enable_http_proxy", 0),
    # A restarted stage is found again within a second. The first value also bounds one connection attempt.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)

BULK_OPTIONS: tuple[tuple[str, Any], ...] = (
    # Windows wide enough for a long fat path from the first frame on; gRPC's probe widens them further.
    ("grpc.http2.lookahead_bytes", 8 * 1024 * 1024),
    ("grpc.http2.max_frame_size", 1024 * 1024),
    ("grpc.http2.write_buffer_size", 1024 * 1024),
)


class Purpose(enum.StrEnum):
    """What a channel carries; each purpose has channels of its own."""

    CONTROL = "control"
    """Short calls and load reports."""
    TOKENS = "tokens"
    """Prefill, decode and generate streams."""
    KV = "kv"
    """Bulk frames: one channel a lane."""


def open_channel(address: str, purpose: Purpose | str = Purpose.CONTROL) -> grpc.aio.Channel:
    """A channel with its own connection, dialled on first use. Whoever opens it closes it (`async with`).

    ValueError: `address` is not host:port.
    """
    split_address(address, "address")
    bulk = BULK_OPTIONS if Purpose(purpose) is Purpose.KV else ()
    return grpc.aio.insecure_channel(address, options=[*_CLIENT_OPTIONS, *bulk])
