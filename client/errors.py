"""The errors that a call can raise: one class for each possible reaction of the caller."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

_DETAILS = "grpc-status-details-bin"  # where gRPC keeps the google.rpc.Status of a failed call


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One invalid field of a request: the field's name in the protocol, and what is wrong with its value."""

    field: str
    description: str


class RequestFailedError(Exception):
    """Base of all errors of this package. `code` is the gRPC status, `message` is the text from the server.

    `retry_seconds` is the delay after which the server asks the caller to retry, or None if the server gave none.
    `reason` is the server's constant for programs, such as DRAINING, or None if the server gave none.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        violations: tuple[FieldViolation, ...] = (),
        retry_seconds: float | None = None,
        reason: str | None = None,
    ) -> None:
        self.code, self.message, self.violations = code, message, violations
        self.retry_seconds, self.reason = retry_seconds, reason
        super().__init__(f"{code.name}: {message}")


class InvalidRequestError(RequestFailedError):
    """Expected: the request is invalid; `violations` lists every invalid field. Correct the request before retrying."""


class UnsupportedError(RequestFailedError):
    """Expected: the request is valid, but this server does not support the feature."""


class NotFoundError(RequestFailedError):
    """Expected: there is no such model, or no live request with that id."""


class AlreadyExistsError(RequestFailedError):
    """Expected: a live request already has this id."""


class QueueFullError(RequestFailedError):
    """Expected: the server's queue is full, or this caller has reached its limit. Retry after `retry_seconds`."""


class UnauthenticatedError(RequestFailedError):
    """Expected: the server requires a token, and this token is missing or unknown."""


class PermissionDeniedError(RequestFailedError):
    """Expected: this caller may not use this method."""


class UnavailableError(RequestFailedError):
    """Expected: the server does not answer, or it is starting, draining or failed. Retry later or on another server."""


class DeadlineExceededError(RequestFailedError):
    """Expected: the deadline passed; the server has stopped working on the request."""


class CancelledError(RequestFailedError):
    """Expected: the call was cancelled before it ended."""


class AbortedError(RequestFailedError):
    """Expected: the server aborted the call, for instance because the caller did not read its stream."""


class ServerFaultError(RequestFailedError):
    """Unexpected: an internal error of the server. Please report it."""


_BY_CODE: dict[grpc.StatusCode, type[RequestFailedError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.UNIMPLEMENTED: UnsupportedError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExistsError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: QueueFullError,
    grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDeniedError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceededError,
    grpc.StatusCode.CANCELLED: CancelledError,
    grpc.StatusCode.ABORTED: AbortedError,
    grpc.StatusCode.INTERNAL: ServerFaultError,
    grpc.StatusCode.UNKNOWN: ServerFaultError,
}


def closed() -> CancelledError:
    """Return the error of a request whose client is closed while the request waits for its next attempt."""
    return CancelledError(grpc.StatusCode.CANCELLED, "the client is closed")


class _Failure(Protocol):
    """The common part of gRPC's two exceptions: the one of blocking calls and the one of asyncio calls."""

    def code(self) -> grpc.StatusCode: ...
    def details(self) -> str | None: ...
    def trailing_metadata(self) -> object: ...


def from_grpc(failure: _Failure | RequestFailedError) -> RequestFailedError:
    """Return the error of this package that corresponds to `failure`, which may already be one."""
    if isinstance(failure, RequestFailedError):
        return failure
    code, details = failure.code(), list(_details(failure))
    kind = _BY_CODE.get(code, RequestFailedError)
    return kind(code, failure.details() or "", _violations(details), _retry_seconds(details), _reason(details))


def _details(failure: _Failure) -> Iterator[any_pb2.Any]:
    metadata = failure.trailing_metadata() or ()
    for key, value in metadata:  # type: ignore[attr-defined]  # typed differently in blocking and asyncio calls
        if key == _DETAILS:
            yield from status_pb2.Status.FromString(value).details


def _violations(details: list[any_pb2.Any]) -> tuple[FieldViolation, ...]:
    found: list[FieldViolation] = []
    for detail in details:
        bad = error_details_pb2.BadRequest()
        if detail.Unpack(bad):
            found += [FieldViolation(v.field, v.description) for v in bad.field_violations]
    return tuple(found)


def _retry_seconds(details: list[any_pb2.Any]) -> float | None:
    retry = error_details_pb2.RetryInfo()
    return next((retry.retry_delay.ToMilliseconds() / 1000 for detail in details if detail.Unpack(retry)), None)


def _reason(details: list[any_pb2.Any]) -> str | None:
    info = error_details_pb2.ErrorInfo()
    return next((info.reason for detail in details if detail.Unpack(info)), None)
