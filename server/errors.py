"""Errors of the server itself, beside `engine.errors`; `server/admission/status.py` maps both to gRPC statuses."""

from __future__ import annotations

from engine.errors import PilotfishError


class Unavailable(PilotfishError):
    """Expected: no work is taken now; another replica may, or this one later. `reason` is a word for programs."""

    def __init__(self, reason: str, problem: str) -> None:
        super().__init__(problem)
        self.reason = reason


class QueueFull(PilotfishError):
    """Expected: no room now; the caller may retry after `retry_seconds`."""

    def __init__(self, problem: str, *, bound: str, retry_seconds: float) -> None:
        super().__init__(problem)
        self.bound, self.retry_seconds = bound, retry_seconds


class QuotaExceeded(QueueFull):
    """Expected: this caller has had its share for now; it may retry after `retry_seconds`."""


class Unauthenticated(PilotfishError):
    """Expected: the token is missing or unknown."""


class Forbidden(PilotfishError):
    """Expected: a known caller asks for what only others may do."""


class NotFound(PilotfishError):
    """Expected: no such model, or no live request of that id."""


class DeadlinePassed(PilotfishError):
    """Expected: the caller's time is up, or would be before the end."""


class Aborted(PilotfishError):
    """Expected: ended from outside before it could start, or its reader stalled."""


class EngineHung(PilotfishError):
    """Unexpected: a step does not end."""


class EngineCrashed(PilotfishError):
    """Unexpected: the engine's process ended, or said what cannot be understood."""


class EngineGone(PilotfishError):
    """Unexpected: the engine failed and cannot begin again in this process. Only a new one helps."""


class RequestFailed(PilotfishError):
    """Unexpected: a fault of ours that ended this request alone."""
