"""Errors in the format that OpenAI's clients expect, a status and `{"error": {...}}`, or Anthropic's clients."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import grpc
from fastapi.responses import JSONResponse

from engine.errors import ContextExcess, InvalidRequest, PilotfishError, Violation, shown
from server.admission.status import MAX_VIOLATION, clipped, refusal, told

_STATUSES = {
    grpc.StatusCode.INVALID_ARGUMENT: (400, "invalid_request_error"),
    grpc.StatusCode.UNIMPLEMENTED: (400, "invalid_request_error"),
    grpc.StatusCode.NOT_FOUND: (404, "invalid_request_error"),
    grpc.StatusCode.ALREADY_EXISTS: (409, "invalid_request_error"),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (429, "rate_limit_error"),
    grpc.StatusCode.UNAUTHENTICATED: (401, "authentication_error"),
    grpc.StatusCode.PERMISSION_DENIED: (403, "permission_error"),
    grpc.StatusCode.UNAVAILABLE: (503, "server_error"),
    grpc.StatusCode.DEADLINE_EXCEEDED: (504, "server_error"),
    grpc.StatusCode.FAILED_PRECONDITION: (412, "invalid_request_error"),
}
MAX_MESSAGE = 4000  # bytes of UTF-8
UNAVAILABLE_SECONDS = 1.0  # a retry after this time may find another state
_OF_A_UNION = re.compile(r"str|function-\w+\[.*|(list|dict|constrained|nullable)[\[-].*|\[key\]")


@dataclass(frozen=True, slots=True)
class HttpError:
    """An error as an HTTP response."""

    status: int
    type: str
    code: str
    message: str
    param: str | None = None
    retry_seconds: float | None = None
    is_of_messages: bool = False  # in Anthropic's format

    def body(self) -> dict[str, Any]:
        if self.is_of_messages:
            kind = _TYPES.get(self.status, "invalid_request_error")
            return {"type": "error", "error": {"type": kind, "message": self.message}}
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """Return the response. Its headers tell clients not to retry after an internal fault or a passed deadline."""
        headers = {}
        if self.retry_seconds is not None:
            headers["Retry-After"] = str(math.ceil(self.retry_seconds))
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.status in (500, 504):
            headers["x-should-retry"] = "false"
        return JSONResponse(self.body(), self.status, headers)


def context_words(field: str, excess: ContextExcess, what: str = "messages") -> str:
    """Say that the context is too short for `what`, in the words by which OpenAI's clients know it."""
    more = " or more" * excess.is_bound
    limit = f"This model's maximum context length is {excess.max_model_len} tokens. However, "
    if not excess.output_tokens:
        found = f"your {what} resulted in {excess.prompt_tokens} tokens{more}"
        return f"{limit}{found}; the limit is {excess.max_prompt_tokens} for a prompt. Shorten the {what}."
    total = excess.prompt_tokens + excess.output_tokens
    parts = f"{excess.prompt_tokens} in the {what}, {excess.output_tokens} in the completion"
    return f"{limit}you requested {total} tokens ({parts}). Shorten the {what}, or lower {field}."


def http_error(error: PilotfishError, context: Callable[[str, ContextExcess], str] = context_words) -> HttpError:
    """Convert `error` to its status, code and message; `context` says in which field the context is exceeded."""
    refused = refusal(error)
    status, kind = _STATUSES.get(refused.code, (500, "server_error"))
    retry = UNAVAILABLE_SECONDS if status == 503 else refused.retry_seconds
    if not isinstance(error, InvalidRequest):
        code = "model_not_found" if status == 404 else refused.metric
        return HttpError(status, kind, code, clipped(str(error), MAX_MESSAGE), retry_seconds=retry)
    found = told(error.violations)
    parts = [str(v) if v.excess is None else context(v.field, v.excess) for v in found]
    message = "; ".join(dict.fromkeys(parts))
    over = next((violation for violation in found if violation.excess is not None), None)
    if over is not None:  # clients shorten the conversation then, and send it again
        return HttpError(status, kind, "context_length_exceeded", message, over.field)
    return HttpError(status, kind, refused.metric, message, found[0].field)


def violations(errors: Sequence[Any]) -> tuple[Violation, ...]:
    """Convert the errors that pydantic found in a body."""
    return tuple(Violation(_path(error), _problem(error)) for error in errors)


INTERNAL = HttpError(500, "server_error", "internal", "internal error")


def _path(error: Any) -> str:
    """("body", "messages", 0, "role") -> "messages[0].role", without pydantic's names for the types of a union."""
    first, *others = error["loc"][1:] or ("body",)
    parts = [first, *(part for part in others if isinstance(part, int) or not _OF_A_UNION.fullmatch(part))]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{clipped(part, MAX_VIOLATION)}" for part in parts)
    return path.removeprefix(".") or "body"


def _problem(error: Any) -> str:
    match error["type"]:
        case "missing":
            return "is missing"
        case "extra_forbidden":
            return f"is {_shown(error['input'])}; this field is not served"
        case "value_error":
            return str(error["ctx"]["error"])
        case "model_type" | "dict_type":
            return f"is {_shown(error['input'])}; expected an object"
        case "string_unicode":  # the key of an object
            return f"has {_shown(error['input'])}, which is no text"
    return f"is {_shown(error['input'])}; {error['msg'][:1].lower()}{error['msg'][1:]}"


def _shown(value: Any, most: int = 80) -> str:
    """`shown`; but of a list or an object, which can have millions of entries, only what is told is written."""
    text = ""
    for piece in _pieces(value):
        text += piece
        if len(text) > most:
            return f"{text[: most - 1]}…"
    return text


def _pieces(value: Any) -> Iterator[str]:
    """Yield what joins to the `repr` of a value of JSON; of long texts the middle is left out."""
    if not isinstance(value, list | dict):
        yield shown(value)
        return
    yield "[" if isinstance(value, list) else "{"
    for i, entry in enumerate(value):
        yield ", " if i else ""
        yield from _pieces(entry)
        if isinstance(value, dict):
            yield ": "
            yield from _pieces(value[entry])
    yield "]" if isinstance(value, list) else "}"


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


def error_at(path: str, error: HttpError | PilotfishError) -> HttpError:
    """Return an error in the format of the routes at this path: Anthropic's or OpenAI's."""
    is_ours = path.startswith("/v1/messages")
    if isinstance(error, PilotfishError):
        what = "prompt" if path.startswith(("/v1/completions", "/generate")) else "messages"
        error = http_error(error, _context if is_ours else partial(context_words, what=what))
    return replace(error, is_of_messages=is_ours)


def _context(field: str, excess: ContextExcess) -> str:
    """Say that the context is too short, in the words by which Anthropic's clients know it."""
    if excess.output_tokens:
        told = f"input length and `{field}` exceed context limit: {excess.prompt_tokens} + {excess.output_tokens}"
        return f"{told} > {excess.max_model_len}"
    return f"prompt is too long: {excess.prompt_tokens} tokens > {excess.max_prompt_tokens} maximum"
