"""What a relayed connection asks of the kernel."""

import asyncio
import socket
from typing import Any

from kvrelay.wan.direction import QUEUE_BYTES
from kvrelay.wan.relay import End, waiting_bytes


class Held:
    """A transport, as far as its socket goes."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def get_extra_info(self, name: str) -> socket.socket:
        return self._sock


def joined() -> tuple[socket.socket, Any]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        return sender, server.accept()[0]


def test_what_waits_in_the_kernel_is_what_has_come_and_is_not_read() -> None:
    sender, receiver = joined()
    with sender, receiver:
        assert waiting_bytes(Held(receiver)) == 0  # type: ignore[arg-type]
        sender.sendall(bytes(1000))
        receiver.recv(1000, socket.MSG_PEEK | socket.MSG_WAITALL)
        assert waiting_bytes(Held(receiver)) == 1000  # type: ignore[arg-type]
        receiver.recv(1000)
        assert waiting_bytes(Held(receiver)) == 0  # type: ignore[arg-type]


def test_behind_a_full_buffer_of_the_kernel_a_queue_of_bytes_waits() -> None:
    sender, receiver = joined()
    with sender, receiver:
        sender.settimeout(0.2)
        try:
            while True:
                sender.send(bytes(64 * 1024))
        except TimeoutError:
            assert waiting_bytes(Held(receiver)) >= QUEUE_BYTES  # type: ignore[arg-type]


class Broken(asyncio.Transport):
    """As uvloop leaves one whose socket it has closed by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.aborted = False

    def is_closing(self) -> bool:
        return False

    def resume_reading(self) -> None:
        raise RuntimeError("the handler is closed")

    def abort(self) -> None:
        self.aborted = True


async def test_an_end_whose_socket_uvloop_has_closed_waits_for_nothing_and_can_be_reset() -> None:
    end = End(lambda end: None, lambda: None)
    end.connection_made(transport := Broken())
    assert end.roomy() == 0
    end.reset()
    assert transport.aborted
