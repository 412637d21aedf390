"""Every error in gRPC's words: a status code, details of google.rpc, and when to come again. Knows no service."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2 as details_pb
from google.rpc import status_pb2

from engine.errors import DuplicateRequest, InvalidRequest, PilotfishError, Unsupported, Violation
from server.errors import Aborted, DeadlinePassed, NotFound, QueueFull, Unavailable

DOMAIN = "pilotfish"
# An error travels in HTTP/2 headers, of which a gRPC client takes 8 KiB by default: beyond that it sees another error.
MAX_MESSAGE = 800  # bytes of UTF-8; three times that once escaped
MAX_VIOLATIONS = 2400  # bytes of all fields and descriptions
MAX_VIOLATION = 300  # characters of one


@dataclass(frozen=True, slots=True)
class Refusal:
    """How an error leaves the server. `metric` is its name among the reasons for not admitting a request."""

    code: grpc.StatusCode
    metric: str
    detail: Message | None = None
    retry_seconds: float | None = None


def refusal(error: PilotfishError) -> Refusal:
    """What to say about `error`."""
    code = grpc.StatusCode
    match error:
        case InvalidRequest():
            return Refusal(code.INVALID_ARGUMENT, "invalid", _bad_request(error))
        case Unsupported():
            return Refusal(code.UNIMPLEMENTED, "unsupported")
        case NotFound():
            return Refusal(code.NOT_FOUND, "not_found")
        case DuplicateRequest():
            return Refusal(code.ALREADY_EXISTS, "duplicate")
        case QueueFull():
            return Refusal(code.RESOURCE_EXHAUSTED, "queue_full", _retry(error), error.retry_seconds)
        case Unavailable():
            info = details_pb.ErrorInfo(reason=error.reason, domain=DOMAIN)
            return Refusal(code.UNAVAILABLE, "unavailable", info)
        case DeadlinePassed():
            return Refusal(code.DEADLINE_EXCEEDED, "deadline")
        case Aborted():
            return Refusal(code.ABORTED, "aborted")
        case _:
            return Refusal(code.INTERNAL, "internal")


def told(violations: Sequence[Violation]) -> list[Violation]:
    """The violations that an error has room for, each cut to size; one more says how many there are beyond them."""
    found: list[Violation] = []
    room = MAX_VIOLATIONS
    for violation in violations:
        short = Violation(clipped(violation.field, MAX_VIOLATION), clipped(violation.problem, MAX_VIOLATION))
        room -= len(str(short).encode())
        if found and room < 0:
            return [*found, Violation("request", f"has {len(violations) - len(found)} more violations")]
        found.append(short)
    return found


def clipped(text: str, most: int) -> str:
    """`text` in at most `most` bytes of UTF-8, with an ellipsis for what is left out at its end."""
    data = text.encode(errors="backslashreplace")
    return data.decode() if len(data) <= most else data[: most - 3].decode(errors="ignore") + "…"


def trailers(refused: Refusal, message: str) -> tuple[tuple[str, str | bytes], ...]:
    """The status with its detail, and the pause after which gRPC's own retry comes again."""
    status = status_pb2.Status(code=refused.code.value[0], message=message)
    if refused.detail is not None:
        status.details.add().Pack(refused.detail)
    pairs: list[tuple[str, str | bytes]] = [("grpc-status-details-bin", status.SerializeToString())]
    if refused.retry_seconds is not None:
        pairs.append(("grpc-retry-pushback-ms", str(round(refused.retry_seconds * 1000))))
    return tuple(pairs)


def _bad_request(error: InvalidRequest) -> details_pb.BadRequest:
    return details_pb.BadRequest(
        field_violations=[
            details_pb.BadRequest.FieldViolation(field=violation.field, description=violation.problem)
            for violation in told(error.violations)
        ]
    )


def _retry(error: QueueFull) -> details_pb.RetryInfo:
    delay = Duration()
    delay.FromMilliseconds(round(error.retry_seconds * 1000))
    return details_pb.RetryInfo(retry_delay=delay)
