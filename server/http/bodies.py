"""From the bytes of a body to its fields, or to all that is wrong with it. Knows no route and no engine."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from email.message import Message
from itertools import islice
from typing import Any, TypeVar

from pydantic import ValidationError

from engine.errors import InvalidRequest, Violation, shown
from server.http.errors import violations
from server.http.requests import ParsedBody, asked, rest
from server.http.types import GenerationFields

BodyT = TypeVar("BodyT", bound=GenerationFields)

# A body of text has few values, one of token ids many. Each takes up to a hundred bytes when it is made.
MIN_VALUES, BYTES_PER_VALUE = 200_000, 16
_PIECES = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[,\[{]', re.DOTALL)  # strings, and what precedes other values
MAX_ERRORS = 100  # that are looked at; an answer has room for fewer


class WrongBody(Exception):  # it becomes an InvalidRequest, with what else is wrong
    """Expected: some fields are invalid. `read` has the others; it is None if the body is no JSON object."""

    def __init__(self, wrong: tuple[Violation, ...], read: ParsedBody | None) -> None:
        super().__init__(f"{len(wrong)} violations")
        self.wrong, self.read = wrong, read


def read_body(kind: type[BodyT], data: bytes, content_type: str) -> tuple[BodyT, ParsedBody]:
    """Return the fields, and the message that they make.

    Raises:
        InvalidRequest: the body cannot be read as JSON.
        WrongBody: fields of it are invalid.
    """
    found = _json(data, content_type)
    try:
        body = kind.model_validate(found)
    except ValidationError as error:
        errors: list[Any] = [
            {**about, "loc": ("body", *about["loc"])} for about in error.errors(include_url=False)[:MAX_ERRORS]
        ]
        if any(about["loc"] == ("body",) for about in errors):
            raise WrongBody(violations(errors), None) from None
        faulty: Iterable[str] = {str(part) for about in errors for part in about["loc"][1:2]}
        raise WrongBody(violations(errors), rest(kind, found, faulty)) from None
    return body, asked(body)


def _count(text: str) -> None:
    """Refuse a text with more values than memory is worth, before any of them is made. Strings count as one value."""
    most = max(MIN_VALUES, len(text) // BYTES_PER_VALUE)
    if text.count('"') // 2 + text.count(",") + text.count("[") + text.count("{") <= most:
        return  # the usual case, which takes less time
    found = sum(1 for _ in islice(_PIECES.finditer(text), most + 1))
    if found > most:
        raise InvalidRequest.of("body", f"has more than {most} values; the limit for {len(text)} characters")


def _json(data: bytes, content_type: str) -> Any:
    """Decode JSON; the content type has to say that it is JSON, so that no web page can send it to another site."""
    described = Message()
    described["content-type"] = content_type or "text/plain"  # a page can send a body of no type, too
    subtype = described.get_content_subtype()
    if described.get_content_maintype() != "application" or not (subtype == "json" or subtype.endswith("+json")):
        raise InvalidRequest.of("body", f"is of type {shown(content_type)}; expected application/json")
    try:
        text = data.decode()
        _count(text)
        return json.loads(text)
    except UnicodeDecodeError as error:
        problem = f"is no UTF-8: the byte {error.object[error.start]:#04x} at {error.start}"
        raise InvalidRequest.of("body", problem) from None
    except json.JSONDecodeError as error:
        raise InvalidRequest.of("body", f"is no JSON: {error.msg} at {error.pos}") from None
    except RecursionError:
        raise InvalidRequest.of("body", "is no JSON that can be read: it is too deep") from None
    except ValueError:  # Python limits the digits of a number
        raise InvalidRequest.of("body", "is no JSON that can be read: a number is too long") from None
