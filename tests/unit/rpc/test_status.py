"""The table, both ways."""

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from kvrelay import errors
from kvrelay.rpc.status import TABLE, from_rpc_error, internal_status, row_of, to_status

SAMPLES: list[errors.KvrelayError] = [
    errors.InvalidRequest("sampling.top_k", "must be at most 7, got 8"),
    errors.Unsupported("logit_bias"),
    errors.NotServed("model 'x'"),
    errors.Overloaded("queue of 64 is full", retry_after_s=2.5),
    errors.NoStage("main decode"),
    errors.StageFailed("p1"),
    errors.LayoutMismatch("dtype: float32 here, float64 there"),
    errors.ProtocolViolation("first_index: 3 expected, got 4"),
    errors.TransferEnded("t1"),
    errors.DeadlineExceeded("waiting for a slot"),
    errors.ModelFileError("x.gguf: truncated"),
    errors.KvrelayError("something"),
]


def received(status: grpc.Status) -> grpc.aio.AioRpcError:
    """The error that a client sees of `status`."""
    return grpc.aio.AioRpcError(
        status.code, grpc.aio.Metadata(), grpc.aio.Metadata(*status.trailing_metadata), status.details
    )


def bare(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)


def test_every_domain_error_has_a_row_of_its_own() -> None:
    shared = {kind for kind in errors.KvrelayError.__subclasses__() if kind.__module__ == errors.__name__}
    kinds = {errors.KvrelayError, *shared}
    assert {row.error for row in TABLE} == kinds
    assert {type(sample) for sample in SAMPLES} == kinds
    assert len({row.reason for row in TABLE}) == len(TABLE)


@pytest.mark.parametrize("error", SAMPLES, ids=lambda e: type(e).__name__)
def test_an_error_crosses_as_itself_and_names_the_peer(error: errors.KvrelayError) -> None:
    status = to_status(error)
    assert status.code is row_of(error).code
    assert status.details == str(error)
    back = from_rpc_error(received(status), "main m1")
    assert type(back) is type(error)
    assert "main m1" in str(back)
    assert str(error) in str(back)


def test_field_and_retry_hint_and_both_layout_values_travel_as_rich_details() -> None:
    invalid = from_rpc_error(received(to_status(SAMPLES[0])), "router")
    assert isinstance(invalid, errors.InvalidRequest)
    assert invalid.field == "sampling.top_k"
    overloaded = from_rpc_error(received(to_status(SAMPLES[3])), "router")
    assert isinstance(overloaded, errors.Overloaded)
    assert overloaded.retry_after_s == 2.5
    rich = rpc_status.from_call(received(to_status(SAMPLES[6])))
    failure = error_details_pb2.PreconditionFailure()
    assert any(detail.Unpack(failure) for detail in rich.details)
    assert failure.violations[0].description == "dtype: float32 here, float64 there"


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, errors.StageFailed),
        (grpc.StatusCode.INTERNAL, errors.StageFailed),
        (grpc.StatusCode.UNKNOWN, errors.StageFailed),
        (grpc.StatusCode.CANCELLED, errors.StageFailed),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.DeadlineExceeded),
        (grpc.StatusCode.INVALID_ARGUMENT, errors.InvalidRequest),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.Overloaded),
        (grpc.StatusCode.UNIMPLEMENTED, errors.Unsupported),
        (grpc.StatusCode.FAILED_PRECONDITION, errors.ProtocolViolation),
    ],
)
def test_a_status_that_is_not_ours_is_read_by_its_code(code: grpc.StatusCode, kind: type) -> None:
    error = from_rpc_error(bare(code, "failed to connect"), "prefill p1")
    assert type(error) is kind
    assert "prefill p1" in str(error)
    assert "failed to connect" in str(error)


def test_the_status_of_an_internal_error_says_nothing_more() -> None:
    error = from_rpc_error(received(internal_status()), "prefill p1")
    assert str(error) == "prefill p1: INTERNAL: internal error"


def test_details_that_cannot_be_read_are_left_out() -> None:
    junk = grpc.aio.Metadata(("grpc-status-details-bin", b"\xff\xff"))
    error = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), junk, "gone")
    assert type(from_rpc_error(error, "p1")) is errors.StageFailed
    other = status_pb2.Status(code=3, message="other").SerializeToString()
    mismatched = grpc.aio.Metadata(("grpc-status-details-bin", other))
    error = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), mismatched, "gone")
    assert type(from_rpc_error(error, "p1")) is errors.StageFailed


def test_a_long_text_is_cut_to_what_headers_carry() -> None:
    status = to_status(errors.InvalidRequest("prompt", "x" * 100_000))
    assert len(status.details) <= 2048
    assert sum(len(value) for _, value in status.trailing_metadata) < 8192
