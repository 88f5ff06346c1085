"""The client's end of one request: writes what may be shown, at the client's speed. Knows no stage."""

import asyncio
from collections.abc import Awaitable, Callable

from kvrelay.proto.v1 import router_pb2
from kvrelay.rpc.convert import fill_tokens
from services.router.answer import Answer, Piece
from services.router.tasks import Bell

Write = Callable[[router_pb2.GenerateReply], Awaitable[None]]


class ClientStream:
    """The request's own task writes; whoever makes the answer grow rings `bell`. Tokens coalesce while it writes."""

    def __init__(self, write: Write, answer: Answer, backlog_tokens: int) -> None:
        self._write = write
        self._answer = answer
        self._backlog_tokens = backlog_tokens
        self._started: Callable[[], router_pb2.Started] | None = None
        self._afterwards: Callable[[], None] | None = None
        self.bell = Bell()
        """Rings when the request's task has something to do."""
        self.shown = False
        """May tokens be written yet?"""
        self.full: asyncio.Event | None = None
        """The client is too far behind: to be waited for before more is read. None: there is room."""

    def start(self, started: Callable[[], router_pb2.Started], afterwards: Callable[[], None]) -> None:
        """What makes the first message; it is asked when the streams that were opened in this tick are on their way.

        `afterwards` is called when that is out, and what else was there by then: whatever the client need not wait for.
        """
        self._started, self._afterwards = started, afterwards

    def wake(self) -> None:
        """The answer has grown, or may be shown now, or is over."""
        if self.full is None and self.shown and self._answer.unread > self._backlog_tokens:
            self.full = asyncio.Event()
        self.bell.ring()

    async def flush(self) -> None:
        """Writes what may be shown; returns when all of it is out."""
        if self._started is not None:
            started, self._started = self._started, None
            # The streams that were opened in this very tick go first: the first token hangs on them.
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            await self._write(router_pb2.GenerateReply(started=started()))
        while self.shown and self._answer.unread:
            for piece in self._answer.pop():
                await self._write(_output(piece))
        if self.full is not None:
            self.full.set()
            self.full = None
        if self._afterwards is not None:
            afterwards, self._afterwards = self._afterwards, None
            afterwards()

    async def complete(self, completed: router_pb2.Completed) -> None:
        """Writes the rest and the last message."""
        await self.flush()
        await self._write(router_pb2.GenerateReply(completed=completed))


def _output(piece: Piece) -> router_pb2.GenerateReply:
    reply = router_pb2.GenerateReply()  # filled in place: messages that are given to a message are copied
    fill_tokens(reply.output.tokens, piece.first_index, piece.ids, piece.logprobs, piece.source)
    if piece.text:
        reply.output.text = piece.text
    return reply
