"""The client's end of one request: writes what may be shown, at the client's speed. Knows no stage."""

import asyncio
from collections.abc import Awaitable, Callable

from kvrelay.proto.v1 import router_pb2
from kvrelay.rpc.convert import token_run_to_proto
from kvrelay.types import TokenRun
from services.router.answer import Answer, Piece

Write = Callable[[router_pb2.GenerateReply], Awaitable[None]]


class ClientStream:
    """One writer task runs `run`; the request wakes it. Tokens coalesce while the client is slow."""

    def __init__(self, write: Write, answer: Answer, backlog_tokens: int) -> None:
        self._write = write
        self._answer = answer
        self._backlog_tokens = backlog_tokens
        self._changed = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._started: router_pb2.Started | None = None
        self._completed: router_pb2.Completed | None = None
        self.shown = False
        """May tokens be written yet?"""

    def start(self, started: router_pb2.Started) -> None:
        """The first message."""
        self._started = started
        self._changed.set()

    def wake(self) -> None:
        """The answer has grown, or may be shown now."""
        if self._answer.unread > self._backlog_tokens and self.shown:
            self._room.clear()
        self._changed.set()

    def complete(self, completed: router_pb2.Completed) -> None:
        """The last message; `run` ends after it."""
        self._completed = completed
        self._changed.set()

    async def room(self) -> None:
        """Returns once the client is not too far behind."""
        await self._room.wait()

    async def run(self) -> None:
        """Writes until the last message is out."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            if self._started is not None:
                started, self._started = self._started, None
                # The streams that were opened in this very tick go first: the first token hangs on them.
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                await self._write(router_pb2.GenerateReply(started=started))
            if self.shown:
                for piece in self._answer.pop():
                    await self._write(router_pb2.GenerateReply(output=_output(piece)))
                self._room.set()
            if self._completed is not None and not self._answer.unread:
                await self._write(router_pb2.GenerateReply(completed=self._completed))
                return


def _output(piece: Piece) -> router_pb2.Output:
    run = TokenRun(piece.first_index, tuple(piece.ids), tuple(piece.logprobs))
    return router_pb2.Output(tokens=token_run_to_proto(run, piece.source), text=piece.text)
