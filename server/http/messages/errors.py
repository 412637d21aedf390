"""Errors in the format that Anthropic's clients expect. Knows no route."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from server.http.errors import HttpError

_TYPES = {  # by status
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


@dataclass(frozen=True, slots=True)
class MessagesError(HttpError):
    """An error as a response of these routes."""

    @classmethod
    def of(cls, error: HttpError) -> MessagesError:
        """Convert an error of the other routes."""
        return cls(**{field.name: getattr(error, field.name) for field in fields(error)})

    def body(self) -> dict[str, Any]:
        """Return the body in Anthropic's format. A stream has it as an event."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}
