"""Errors of the server. `server/admission/status.py` maps them, and those of `engine.errors`, to gRPC statuses."""

from __future__ import annotations

from pilotfish.engine.errors import PilotfishError


class Unavailable(PilotfishError):
    """Expected: the server accepts no requests now. The caller may retry later or use another replica.

    `reason` is a constant that programs can compare.
    """

    def __init__(self, reason: str, problem: str) -> None:
        super().__init__(problem)
        self.reason = reason


class QueueFull(PilotfishError):
    """Expected: the queue is full; the caller may retry after `retry_seconds`."""

    def __init__(self, problem: str, *, bound: str, retry_seconds: float) -> None:
        super().__init__(problem)
        self.bound, self.retry_seconds = bound, retry_seconds


class QuotaExceeded(QueueFull):
    """Expected: the caller has reached its quota; it may retry after `retry_seconds`."""


class Unauthenticated(PilotfishError):
    """Expected: the token is missing or unknown."""


class Forbidden(PilotfishError):
    """Expected: the token is valid, but does not allow this call."""


class NotFound(PilotfishError):
    """Expected: the model or the adapter is not served, or no live request has this id."""


class AdapterExists(PilotfishError):
    """Expected: an adapter of this name is loaded, or requests still use one that is being unloaded."""


class ResumeRefused(PilotfishError):
    """Expected: a stream cannot be resumed here: the server has another model, or the regenerated tokens differ."""


class DeadlinePassed(PilotfishError):
    """Expected: the deadline has passed, or will pass before the request can end."""


class Aborted(PilotfishError):
    """Expected: the request was ended before it started, or its reader stalled."""


class EngineHung(PilotfishError):
    """Unexpected: a step does not end, or the engine process has sent nothing for too long."""


class EngineCrashed(PilotfishError):
    """Unexpected: the engine process ended. `status`: its exit status, -N for signal N, None if unknown."""

    status: int | None = None


class RequestFailed(PilotfishError):
    """Unexpected: an internal error ended this request; other requests continue."""
