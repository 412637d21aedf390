"""Converts errors to gRPC: a status code, details of google.rpc, and the delay before a retry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2 as details_pb
from google.rpc import status_pb2

from pilotfish.engine.errors import DuplicateRequest, InvalidRequest, PilotfishError, Unsupported, Violation
from pilotfish.server.errors import (
    Aborted,
    AdapterExists,
    DeadlinePassed,
    Forbidden,
    NotFound,
    QueueFull,
    QuotaExceeded,
    ResumeRefused,
    Unauthenticated,
    Unavailable,
)

DOMAIN = "pilotfish"
# The reason of an INVALID_ARGUMENT that a shorter prompt avoids.
CONTEXT_EXCEEDED = "CONTEXT_LENGTH_EXCEEDED"
# An error is sent in HTTP/2 headers. A gRPC client accepts 8 KiB of headers by default; if they are larger, it reports
# another error.
MAX_MESSAGE = 800  # bytes of UTF-8; percent-encoding can triple them
MAX_VIOLATIONS = 2400  # bytes of all fields and descriptions
MAX_VIOLATION = 300  # bytes of one field or description
# The delay before a retry, by the reason of UNAVAILABLE. A server that drains or has failed gives none, because another
# server can be tried at once.
RESTART_SECONDS = {"STARTING": 1.0, "ENGINE_RESTARTING": 0.5}


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error as it is sent to the caller. `metric` is the reason in the metric of refused requests."""

    code: grpc.StatusCode
    metric: str
    details: tuple[Message, ...] = ()
    retry_seconds: float | None = None


_PLAIN = {  # errors that need no details
    Unsupported: Refusal(grpc.StatusCode.UNIMPLEMENTED, "unsupported"),
    NotFound: Refusal(grpc.StatusCode.NOT_FOUND, "not_found"),
    DuplicateRequest: Refusal(grpc.StatusCode.ALREADY_EXISTS, "duplicate"),
    AdapterExists: Refusal(grpc.StatusCode.ALREADY_EXISTS, "adapter_exists"),
    DeadlinePassed: Refusal(grpc.StatusCode.DEADLINE_EXCEEDED, "deadline"),
    Unauthenticated: Refusal(grpc.StatusCode.UNAUTHENTICATED, "unauthenticated"),
    Forbidden: Refusal(grpc.StatusCode.PERMISSION_DENIED, "forbidden"),
    Aborted: Refusal(grpc.StatusCode.ABORTED, "aborted"),
    ResumeRefused: Refusal(grpc.StatusCode.FAILED_PRECONDITION, "resume"),
}


def refusal(error: PilotfishError) -> Refusal:
    """Convert `error`; any other type becomes an internal error."""
    match error:
        case InvalidRequest():
            too_long = any(violation.excess for violation in error.violations)
            info = [details_pb.ErrorInfo(reason=CONTEXT_EXCEEDED, domain=DOMAIN)] if too_long else []
            found = [
                details_pb.BadRequest.FieldViolation(field=violation.field, description=violation.problem)
                for violation in shortened(error.violations)
            ]
            request = details_pb.BadRequest(field_violations=found)
            return Refusal(grpc.StatusCode.INVALID_ARGUMENT, "invalid", (request, *info))
        case QueueFull():
            metric = "quota" if isinstance(error, QuotaExceeded) else "queue_full"
            violation = details_pb.QuotaFailure.Violation(
                subject=error.bound, description=clipped(str(error), MAX_VIOLATION)
            )
            why = _retry(error.retry_seconds), details_pb.QuotaFailure(violations=[violation])
            return Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, metric, why, error.retry_seconds)
        case Unavailable():
            details: list[Message] = [details_pb.ErrorInfo(reason=error.reason, domain=DOMAIN)]
            seconds = RESTART_SECONDS.get(error.reason)
            if seconds is not None:
                details.append(_retry(seconds))
            return Refusal(grpc.StatusCode.UNAVAILABLE, "unavailable", tuple(details), seconds)
    return _PLAIN.get(type(error), Refusal(grpc.StatusCode.INTERNAL, "internal"))


def shortened(violations: Sequence[Violation]) -> list[Violation]:
    """Return the violations that fit into an error, each truncated; the last one is the number of omitted ones."""
    found: list[Violation] = []
    room = MAX_VIOLATIONS
    for violation in violations:
        field, problem = (clipped(text, MAX_VIOLATION) for text in (violation.field, violation.problem))
        short = replace(violation, field=field, problem=problem)
        room -= len(str(short).encode())
        if found and room < 0:
            return [*found, Violation("request", f"has {len(violations) - len(found)} more violations")]
        found.append(short)
    return found


def clipped(text: str, limit: int) -> str:
    """Truncate `text` to `limit` bytes of UTF-8; a truncated text ends with an ellipsis."""
    data = text.encode(errors="backslashreplace")
    return data.decode() if len(data) <= limit else data[: limit - 3].decode(errors="ignore") + "…"


def trailers(refused: Refusal, message: str) -> tuple[tuple[str, str | bytes], ...]:
    """Return the trailing metadata: the status with its details, and the delay before gRPC's own retry."""
    status = status_pb2.Status(code=refused.code.value[0], message=message)
    for detail in refused.details:
        status.details.add().Pack(detail)
    pairs: list[tuple[str, str | bytes]] = [("grpc-status-details-bin", status.SerializeToString())]
    if refused.retry_seconds is not None:
        pairs.append(("grpc-retry-pushback-ms", str(round(refused.retry_seconds * 1000))))
    return tuple(pairs)


def _retry(seconds: float) -> details_pb.RetryInfo:
    delay = Duration()
    delay.FromMilliseconds(round(seconds * 1000))
    return details_pb.RetryInfo(retry_delay=delay)
