"""THE table of domain errors and gRPC status, read both ways. Knows no service and no handler."""

from collections.abc import Callable
from dataclasses import dataclass

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status  # type: ignore[import-untyped]

from kvrelay import errors

_DOMAIN = "kvrelay"
_LOST_STATUS = "Internal error from Core"
_MAX_TEXT = 2048
"""Characters of a status text: it travels in headers, which gRPC limits to 8 KiB."""


@dataclass(frozen=True, slots=True)
class Row:
    """One error: its status code, and the reason by which the other side knows it again."""

    error: type[errors.KvrelayError]
    code: grpc.StatusCode
    reason: str


TABLE: tuple[Row, ...] = (
    Row(errors.InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST"),
    Row(errors.Unsupported, grpc.StatusCode.UNIMPLEMENTED, "UNSUPPORTED"),
    Row(errors.NotServed, grpc.StatusCode.NOT_FOUND, "NOT_SERVED"),
    Row(errors.Overloaded, grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED"),
    Row(errors.NoStage, grpc.StatusCode.UNAVAILABLE, "NO_STAGE"),
    Row(errors.StageFailed, grpc.StatusCode.UNAVAILABLE, "STAGE_FAILED"),
    Row(errors.LayoutMismatch, grpc.StatusCode.FAILED_PRECONDITION, "LAYOUT_MISMATCH"),
    Row(errors.ProtocolViolation, grpc.StatusCode.FAILED_PRECONDITION, "PROTOCOL_VIOLATION"),
    Row(errors.TransferEnded, grpc.StatusCode.CANCELLED, "TRANSFER_ENDED"),
    Row(errors.DeadlineExceeded, grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"),
    Row(errors.ModelFileError, grpc.StatusCode.INTERNAL, "MODEL_FILE_ERROR"),
    Row(errors.KvrelayError, grpc.StatusCode.INTERNAL, "KVRELAY_ERROR"),
)

_BY_REASON = {row.reason: row for row in TABLE}

_WITHOUT_REASON: dict[grpc.StatusCode, type[errors.KvrelayError]] = {
    # Codes that gRPC itself gives, or a server that is not ours.
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidRequest,
    grpc.StatusCode.UNIMPLEMENTED: errors.Unsupported,
    grpc.StatusCode.NOT_FOUND: errors.NotServed,
    grpc.StatusCode.FAILED_PRECONDITION: errors.ProtocolViolation,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
}


def row_of(error: errors.KvrelayError) -> Row:
    """The first row whose error `error` is."""
    return next(row for row in TABLE if isinstance(error, row.error))


def to_status(error: errors.KvrelayError) -> grpc.Status:
    """The status of `error`, with google.rpc details: ErrorInfo always, and what its kind has to say."""
    row = row_of(error)
    rich = status_pb2.Status(code=row.code.value[0], message=str(error)[:_MAX_TEXT])
    rich.details.extend(_packed(detail) for detail in _details(error, row))
    return _status(rich)


def internal_status() -> grpc.Status:
    """The status of an error that is nobody's business but the log's."""
    return _status(status_pb2.Status(code=grpc.StatusCode.INTERNAL.value[0], message="internal error"))


def _status(rich: status_pb2.Status) -> grpc.Status:
    status: grpc.Status = rpc_status.to_status(rich)
    return status


def broke_while_writing(error: grpc.aio.AioRpcError) -> bool:
    """Whether grpc.aio lost the status of a stream that ended while a message was being written to it.

    It then says INTERNAL, whatever the server said: the stream may have been refused for any reason.
    """
    return error.code() is grpc.StatusCode.INTERNAL and (error.details() or "").startswith(_LOST_STATUS)


def from_rpc_error(error: grpc.aio.AioRpcError, peer: str) -> errors.KvrelayError:
    """What the failed call means here; its text names `peer` and the status. Raises nothing."""
    details = _received(error)
    info = details.get(error_details_pb2.ErrorInfo)
    text = error.details() or "no details"
    if isinstance(info, error_details_pb2.ErrorInfo) and info.domain == _DOMAIN and info.reason in _BY_REASON:
        return _rebuilt(_BY_REASON[info.reason].error, text, details, peer)
    if broke_while_writing(error):
        return errors.StageFailed(f"{peer}: the stream ended while it was written to")
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
        if "larger than max" in text:
            return errors.InvalidRequest("message", f"{text} ({peer})")
        return _rebuilt(errors.Overloaded, text, details, peer)
    kind = _WITHOUT_REASON.get(error.code(), errors.StageFailed)
    return _rebuilt(kind, f"{error.code().name}: {text}", details, peer)


def _details(error: errors.KvrelayError, row: Row) -> list[Message]:
    details: list[Message] = [error_details_pb2.ErrorInfo(domain=_DOMAIN, reason=row.reason)]
    if isinstance(error, errors.InvalidRequest):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=error.problem[:_MAX_TEXT]
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    elif isinstance(error, errors.Overloaded):
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(round(error.retry_after_s * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    elif isinstance(error, errors.LayoutMismatch):
        broken = error_details_pb2.PreconditionFailure.Violation(
            type="LAYOUT", subject="layout", description=str(error)[:_MAX_TEXT]
        )
        details.append(error_details_pb2.PreconditionFailure(violations=[broken]))
    return details


def _packed(message: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


_Details = dict[type[Message], Message]

_DETAIL_KINDS: tuple[Callable[[], Message], ...] = (
    error_details_pb2.ErrorInfo,
    error_details_pb2.BadRequest,
    error_details_pb2.RetryInfo,
)


def _received(error: grpc.aio.AioRpcError) -> _Details:
    """The details of kinds that are used here, by type; those that cannot be read are left out."""
    try:
        rich = rpc_status.from_call(error)  # it reads three methods that AioRpcError has too
    except (ValueError, DecodeError):
        return {}
    found: _Details = {}
    for packed in rich.details if rich is not None else ():
        for kind in _DETAIL_KINDS:
            message = kind()
            if packed.Is(message.DESCRIPTOR) and packed.Unpack(message):
                found[type(message)] = message
    return found


def _rebuilt(kind: type[errors.KvrelayError], text: str, details: _Details, peer: str) -> errors.KvrelayError:
    if issubclass(kind, errors.InvalidRequest):
        bad = details.get(error_details_pb2.BadRequest)
        if isinstance(bad, error_details_pb2.BadRequest) and bad.field_violations:
            first = bad.field_violations[0]
            return kind(first.field, f"{first.description} ({peer})")
        return kind("request", f"{text} ({peer})")
    if issubclass(kind, errors.Overloaded):
        retry = details.get(error_details_pb2.RetryInfo)
        if isinstance(retry, error_details_pb2.RetryInfo):
            return kind(f"{peer}: {text}", retry.retry_delay.ToNanoseconds() / 1e9)
    return kind(f"{peer}: {text}")
