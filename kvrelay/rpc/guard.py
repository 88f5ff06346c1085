"""What stands between gRPC and every handler: errors become status, bad bytes become errors, calls are counted."""

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Collection
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from kvrelay.errors import InvalidRequest, KvrelayError
from kvrelay.rpc.status import from_rpc_error, internal_status, row_of, to_status

log = logging.getLogger(__name__)

_Behavior = Callable[[Any, Any], Any]


@dataclass(frozen=True, slots=True)
class _Malformed:
    """Stands for a unary request that could not be read, until the handler's turn comes."""

    error: InvalidRequest


def client_error(exc: BaseException) -> KvrelayError | None:
    """What the client may know of `exc`: itself, or the first leaf of a group of such; None: nothing.

    One leaf that is no KvrelayError makes the whole group a fault of ours.
    """
    if isinstance(exc, KvrelayError):
        return exc
    if isinstance(exc, grpc.aio.AioRpcError):
        return from_rpc_error(exc, "a stage")
    if isinstance(exc, BaseExceptionGroup):
        leaves = [client_error(leaf) for leaf in exc.exceptions]
        return leaves[0] if all(leaves) else None
    return None


class RpcGuard(grpc.aio.ServerInterceptor):
    """Wraps handlers of all four kinds, async generators and coroutines alike.

    KvrelayError -> its status by the table; anything else -> INTERNAL "internal error" and a traceback in the log.
    CancelledError passes through. A generator is closed before its call ends, so its `finally` runs at once even if
    the client left between two messages.
    """

    def __init__(self) -> None:
        self._handlers: dict[str, Any] = {}
        """By method: wrapped at its first call."""
        self._running: dict[asyncio.Task[Any], str] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def running(self) -> Collection[str]:
        """The methods of the calls under way."""
        return self._running.values()

    async def idle(self) -> None:
        """Returns once no call is under way."""
        await self._idle.wait()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Part of grpc.aio.ServerInterceptor."""
        method = handler_call_details.method
        found = self._handlers.get(method)
        if found is None and (handler := await continuation(handler_call_details)) is not None:
            found = self._handlers[method] = self._guarded(handler, method)
        return found

    def _guarded(self, handler: Any, method: str) -> Any:
        codec = {
            "request_deserializer": _reader(handler.request_deserializer, method, handler.request_streaming),
            "response_serializer": handler.response_serializer,
        }
        if handler.response_streaming:
            if handler.request_streaming:
                return grpc.stream_stream_rpc_method_handler(self._streaming(handler.stream_stream, method), **codec)
            return grpc.unary_stream_rpc_method_handler(self._streaming(handler.unary_stream, method), **codec)
        if handler.request_streaming:
            return grpc.stream_unary_rpc_method_handler(self._unary(handler.stream_unary, method), **codec)
        return grpc.unary_unary_rpc_method_handler(self._unary(handler.unary_unary, method), **codec)

    def _unary(self, behavior: _Behavior, method: str) -> _Behavior:
        async def call(request: Any, context: Any) -> Any:
            async with _Call(self, method, context):
                return await behavior(_read(request), context)

        return call

    def _streaming(self, behavior: _Behavior, method: str) -> _Behavior:
        async def call(request: Any, context: Any) -> None:
            async with _Call(self, method, context):
                answer = behavior(_read(request), context)
                if inspect.isawaitable(answer):
                    await answer
                    return
                async with aclosing(answer) as messages:
                    async for message in messages:
                        await context.write(message)

        return call

    def begun(self, method: str) -> asyncio.Task[Any]:
        """A call of this task's begins."""
        task = asyncio.current_task()
        assert task is not None
        self._running[task] = method
        self._idle.clear()
        return task

    def ended(self, task: asyncio.Task[Any]) -> None:
        """It is over."""
        del self._running[task]
        if not self._running:
            self._idle.set()


class _Call:
    """One call under way. Not a generator: those cost a request more than what is done here."""

    __slots__ = ("_context", "_guard", "_method", "_task")

    def __init__(self, guard: RpcGuard, method: str, context: Any) -> None:
        self._guard, self._method, self._context = guard, method, context

    async def __aenter__(self) -> None:
        self._task = self._guard.begun(self._method)

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        try:
            if not isinstance(error, Exception) or isinstance(error, grpc.aio.AbortError):
                return False
            await _abort(error, self._method, self._context)
            return True  # whoever has left already need not be told
        finally:
            self._guard.ended(self._task)


async def _abort(exc: Exception, method: str, context: Any) -> None:
    if context.done() or context.cancelled():
        log.debug("%s: %r after its end", method, exc)
        return
    error = client_error(exc)
    if error is None:
        log.error("%s: internal error", method, exc_info=exc)
        status = internal_status()
    else:
        log.info("%s: %s: %s", method, row_of(error).code.name, error)
        status = to_status(error)
    await context.abort(status.code, status.details, status.trailing_metadata)


def _read(request: Any) -> Any:
    if isinstance(request, _Malformed):
        raise request.error
    return request


def _reader(parse: Callable[[bytes], Any] | None, method: str, streaming: bool) -> Callable[[bytes], Any] | None:
    """`parse` with a clear error. gRPC parses a unary request before any interceptor could catch what is raised, so
    there the error is passed on as a value.
    """
    if parse is None:
        return None

    def read(raw: bytes) -> Any:
        try:
            return parse(raw)
        except (DecodeError, UnicodeDecodeError) as exc:
            error = InvalidRequest("message", f"not a valid request of {method} (bad encoding, or text not UTF-8)")
            error.__cause__ = exc
            if streaming:
                raise error from exc
            return _Malformed(error)

    return read
