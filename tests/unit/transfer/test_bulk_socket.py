"""How bulk connections are opened."""

import asyncio
import socket

import pytest

from kvrelay.transfer.bulk_socket import connect


@pytest.mark.skipif(not hasattr(socket, "TCP_CONGESTION"), reason="Linux only")
async def test_a_connection_to_this_host_is_not_paced() -> None:
    async with await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0) as server:
        with await connect(f"localhost:{server.sockets[0].getsockname()[1]}") as sock:
            control = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    assert control.rstrip(b"\0") == b"reno"


async def test_where_nobody_listens_there_is_no_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as was:
        port = was.getsockname()[1]
    with pytest.raises(ConnectionRefusedError):
        await connect(f"127.0.0.1:{port}")
