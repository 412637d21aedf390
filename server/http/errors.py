"""Errors in the formats of OpenAI's (a status and `{"error": {...}}`) and Anthropic's clients."""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from fastapi.responses import JSONResponse

from pilotfish.engine.errors import ContextExcess, InvalidRequest, PilotfishError, Violation, shown
from pilotfish.server.admission.status import MAX_VIOLATION, clipped, refusal, shortened

_STATUSES = {  # all others: 500
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.UNIMPLEMENTED: 400,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.ALREADY_EXISTS: 409,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
    grpc.StatusCode.FAILED_PRECONDITION: 412,
}
_INVALID = "invalid_request_error"
_TYPES = {  # by status: OpenAI's and Anthropic's type; `_INVALID` for all others
    401: ("authentication_error", "authentication_error"),
    403: ("permission_error", "permission_error"),
    404: (_INVALID, "not_found_error"),
    413: (_INVALID, "request_too_large"),
    429: ("rate_limit_error", "rate_limit_error"),
    500: ("server_error", "api_error"),
    503: ("server_error", "overloaded_error"),
    504: ("server_error", "timeout_error"),
}
MAX_MESSAGE = 4000  # bytes of UTF-8
UNAVAILABLE_SECONDS = 1.0  # a retry after this time may find another state
MESSAGES = "/v1/messages"  # Anthropic's routes
_TAGS = re.compile(r"<\d+>|\[key\]")  # of unions, and of an object's keys


@dataclass(frozen=True, slots=True)
class HttpError:
    """An error as an HTTP response."""

    status: int
    code: str
    message: str
    param: str | None = None
    retry_seconds: float | None = None

    def body(self, path: str = "") -> dict[str, Any]:
        """Return the body in the format of the route at this path: Anthropic's or OpenAI's."""
        openai, anthropic = _TYPES.get(self.status, (_INVALID, _INVALID))
        if path.startswith(MESSAGES):
            return {"type": "error", "error": {"type": anthropic, "message": self.message}}
        return {"error": {"message": self.message, "type": openai, "param": self.param, "code": self.code}}

    def response(self, path: str) -> JSONResponse:
        """Return the response. After an internal error or a passed deadline, its headers ask clients not to retry."""
        headers = {}
        if self.retry_seconds is not None:
            headers["Retry-After"] = str(math.ceil(self.retry_seconds))
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.status in (500, 504):
            headers["x-should-retry"] = "false"
        return JSONResponse(self.body(path), self.status, headers)


def http_error(error: HttpError | PilotfishError, path: str = "") -> HttpError:
    """Convert `error` to its status, code and message, for the clients of the routes at this path."""
    if isinstance(error, HttpError):
        return error
    refused = refusal(error)
    status = _STATUSES.get(refused.code, 500)
    retry = UNAVAILABLE_SECONDS if status == 503 else refused.retry_seconds
    if not isinstance(error, InvalidRequest):
        code = "model_not_found" if status == 404 else refused.metric
        return HttpError(status, code, clipped(str(error), MAX_MESSAGE), retry_seconds=retry)
    found = shortened(error.violations)
    over = next((violation for violation in found if violation.excess is not None), None)
    parts = [str(v) if v.excess is None else _context_words(path, v.field, v.excess) for v in found]
    # Clients that see this code shorten the conversation and send it again.
    code, field = (refused.metric, found[0].field) if over is None else ("context_length_exceeded", over.field)
    return HttpError(status, code, "; ".join(dict.fromkeys(parts)), field)


def _context_words(path: str, field: str, excess: ContextExcess) -> str:
    """Report that the context is too short, in a wording that clients of the API recognise."""
    num_prompt, num_output, most = excess.prompt_tokens, excess.output_tokens, excess.max_prompt_tokens
    if path.startswith(MESSAGES):
        if num_output:
            return (
                f"input length and `{field}` exceed context limit: {num_prompt} + {num_output} > {excess.max_model_len}"
            )
        return f"prompt is too long: {num_prompt} tokens > {most} maximum"
    what = "prompt" if path.startswith(("/v1/completions", "/generate")) else "messages"
    limit = f"This model's maximum context length is {excess.max_model_len} tokens. However, "
    if num_output:
        parts = f"{num_prompt} in the {what}, {num_output} in the completion"
        total = f"{num_prompt + num_output} tokens ({parts})"
        return f"{limit}you requested {total}. Shorten the {what}, or lower {field}."
    found = f"your {what} resulted in {num_prompt} tokens{' or more' * excess.is_bound}"
    return f"{limit}{found}; the limit is {most} for a prompt. Shorten the {what}."


def violations(errors: Sequence[Any]) -> list[Violation]:
    """Convert pydantic's errors to violations."""
    return [Violation(_path(error), _problem(error)) for error in errors]


INTERNAL = HttpError(500, "internal", "internal error")


def _path(error: Any) -> str:
    """("messages", 0, "role") -> "messages[0].role"."""
    parts = [part for part in error["loc"] if isinstance(part, int) or not _TAGS.fullmatch(part)]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{clipped(part, MAX_VIOLATION)}" for part in parts)
    return path.removeprefix(".") or "body"


def _problem(error: Any) -> str:
    match error["type"]:
        case "missing":
            return "is missing"
        case "extra_forbidden":
            return f"is {_shown(error['input'])}; this field is not supported"
        case "value_error":
            return str(error["ctx"]["error"])
        case "model_type" | "dict_type":
            return f"is {_shown(error['input'])}; expected an object"
        case "string_unicode":  # the key of an object
            return f"has {_shown(error['input'])}; expected a string"
    return f"is {_shown(error['input'])}; {error['msg'][:1].lower()}{error['msg'][1:]}"


_REPR = reprlib.Repr()
_REPR.maxlist = _REPR.maxdict = _REPR.maxstring = 80


def _shown(value: Any) -> str:
    """Like `shown`, but formats only the reported part of a list or an object, which can have millions of entries."""
    if not isinstance(value, list | dict):
        return shown(value)
    text = _REPR.repr(value)
    return text if len(text) <= 80 else f"{text[:79]}…"
