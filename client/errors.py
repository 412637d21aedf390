"""What a call can end with instead of an answer: one class per thing a caller may want to do about it."""

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
    """One thing wrong with a request: the field, named as in the protocol, and what is wrong with it."""

    field: str
    description: str


class RequestFailedError(Exception):
    """Base of all errors of this package. `code` is the gRPC status, `message` the server's words.

    `retry_seconds` is when the server says to come again, if it does.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        violations: tuple[FieldViolation, ...] = (),
        retry_seconds: float | None = None,
    ) -> None:
        self.code, self.message, self.violations, self.retry_seconds = code, message, violations, retry_seconds
        super().__init__(f"{code.name}: {message}")


class InvalidRequestError(RequestFailedError):
    """Expected: the request is wrong; `violations` tells every field. Mend it before asking again."""


class UnsupportedError(RequestFailedError):
    """Expected: the request is sound, but this server has no such feature."""


class NotFoundError(RequestFailedError):
    """Expected: no such model, or no live request of that id."""


class AlreadyExistsError(RequestFailedError):
    """Expected: a live request has this id."""


class QueueFullError(RequestFailedError):
    """Expected: the server has no room now, or this caller has had its share. Ask again after `retry_seconds`."""


class UnauthenticatedError(RequestFailedError):
    """Expected: the server asks for a token, and this one is nobody's."""


class PermissionDeniedError(RequestFailedError):
    """Expected: only others may do this."""


class UnavailableError(RequestFailedError):
    """Expected: nobody answers, or the server is starting, draining or dead. Ask again later or elsewhere."""


class DeadlineExceededError(RequestFailedError):
    """Expected: the deadline passed; the server has stopped working on the request."""


class CancelledError(RequestFailedError):
    """Expected: the call was cancelled on its way."""


class AbortedError(RequestFailedError):
    """Expected: the server gave up the call, for instance because its stream was not read."""


class ServerFaultError(RequestFailedError):
    """Unexpected: a fault of the server's. Worth a report."""


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


class _Failure(Protocol):
    """What gRPC's two exceptions, of blocking and of asyncio calls, have in common."""

    def code(self) -> grpc.StatusCode: ...
    def details(self) -> str | None: ...
    def trailing_metadata(self) -> object: ...


def from_grpc(failure: _Failure) -> RequestFailedError:
    """The error that says what `failure` says."""
    code, details = failure.code(), list(_details(failure))
    kind = _BY_CODE.get(code, RequestFailedError)
    return kind(code, failure.details() or "", _violations(details), _retry_seconds(details))


def _details(failure: _Failure) -> Iterator[any_pb2.Any]:
    metadata = failure.trailing_metadata() or ()
    for key, value in metadata:  # type: ignore[attr-defined]  # pairs, of one type here and of another there
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
