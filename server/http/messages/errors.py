"""Errors in the format that Anthropic's clients expect. Knows no route."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from engine.errors import ContextExcess, PilotfishError
from server.http.errors import HttpError, context_words, http_error

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


def error_at(path: str, error: HttpError | PilotfishError) -> HttpError:
    """Return an error in the format of the routes at this path: Anthropic's or OpenAI's."""
    is_ours = path.startswith("/v1/messages")
    if isinstance(error, PilotfishError):
        what = "prompt" if path.startswith(("/v1/completions", "/generate")) else "messages"
        error = http_error(error, _context if is_ours else partial(context_words, what=what))
    return MessagesError.of(error) if is_ours else error


def _context(field: str, excess: ContextExcess) -> str:
    """Say that the context is too short, in the words by which Anthropic's clients know it."""
    if excess.output_tokens:
        told = f"input length and `{field}` exceed context limit: {excess.prompt_tokens} + {excess.output_tokens}"
        return f"{told} > {excess.max_model_len}"
    return f"prompt is too long: {excess.prompt_tokens} tokens > {excess.max_prompt_tokens} maximum"
