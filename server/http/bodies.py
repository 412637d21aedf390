"""From the bytes of a body to its fields, or to all that is wrong with it. Knows no route and no engine."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import replace
from email.message import Message
from itertools import islice
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from engine.errors import InvalidRequest, Violation, shown
from pilotfish.v1 import generation_pb2 as pb
from server.http.errors import violations
from server.http.fields import without_tags
from server.http.requests import ParsedBody, asked, rest
from server.http.types import GenerationFields

BodyT = TypeVar("BodyT", bound=GenerationFields)
FieldsT = TypeVar("FieldsT", bound=BaseModel)

MAX_PARTS = 200_000  # strings, lists and objects: each takes up to two hundred bytes when it is made
_PARTS = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[{]', re.DOTALL)
MAX_DIGITS = 1000  # of a whole number: to read one takes a time that grows with the square, and none served has more
MAX_ERRORS = 100  # that are looked at; an answer has room for fewer


class WrongBody(Exception):  # it becomes an InvalidRequest, with what else is wrong
    """Expected: some fields are invalid. `read` has the others, and what is wrong with these."""

    def __init__(self, read: ParsedBody) -> None:
        super().__init__(f"{len(read.wrong)} violations")
        self.read = read


def read_body(kind: type[BodyT], data: bytes, content_type: str) -> tuple[BodyT, ParsedBody]:
    """Return the fields, and the message that they make.

    Raises:
        InvalidRequest: the body is no JSON object that can be read.
        WrongBody: fields of it are invalid.
    """
    found = read_json(data, content_type)
    try:
        body = kind.model_validate(found)
        return body, asked(body)
    except ValidationError as error:
        wrong = _wrong(kind, found, error)
    except InvalidRequest as invalid:  # of a conversation
        wrong = WrongBody(ParsedBody(pb.GenerateRequest(), invalid.violations))
    del found  # it can have a hundred megabytes, and the traceback would keep it
    raise wrong


def fields_of(kind: type[FieldsT], data: bytes, content_type: str) -> FieldsT:
    """Return the fields of a body; InvalidRequest with all that is wrong with them."""
    try:
        return kind.model_validate(read_json(data, content_type))
    except ValidationError as error:
        wrong = _violations(error.errors(include_url=False)[:MAX_ERRORS], has_tags=True)
    raise InvalidRequest(wrong)


def _violations(found: Iterable[Any], *, has_tags: bool) -> tuple[Violation, ...]:
    return violations(
        [{**about, "loc": ("body", *(without_tags(about["loc"]) if has_tags else about["loc"]))} for about in found]
    )


def _wrong(kind: type[BodyT], found: Any, error: ValidationError) -> WrongBody | InvalidRequest:
    errors = error.errors(include_url=False)[:MAX_ERRORS]
    wrong = _violations(errors, has_tags=kind.no_input is None)
    if kind.no_input is None:
        return WrongBody(ParsedBody(pb.GenerateRequest(), wrong))
    if any(not about["loc"] for about in errors):
        return InvalidRequest(wrong)
    read = rest(kind, found, {str(about["loc"][0]) for about in errors})
    return WrongBody(replace(read, wrong=(*wrong, *read.wrong)))


def _require_few_parts(text: str) -> None:
    """Refuse a text of more parts than memory is worth, before any of them is made."""
    if text.count('"') // 2 + text.count("[") + text.count("{") <= MAX_PARTS:
        return  # the usual case, which takes less time
    found = sum(1 for _ in islice(_PARTS.finditer(text), MAX_PARTS + 1))
    if found > MAX_PARTS:
        raise InvalidRequest.of("body", f"has more than {MAX_PARTS} strings, lists and objects, which is the limit")


def _whole(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise InvalidRequest.of("body", f"is no JSON that can be read: a number is too long, of {len(digits)} digits")
    return int(digits)


def _real(digits: str) -> float:
    """Convert as Python would, but between two numbers other threads can run."""
    return float(digits)


def read_json(data: bytes, content_type: str) -> Any:
    """Decode JSON; the content type has to say that it is JSON, so that no web page can send it to another site."""
    described = Message()
    described["content-type"] = content_type or "text/plain"  # a page can send a body of no type, too
    subtype = described.get_content_subtype()
    if described.get_content_maintype() != "application" or not (subtype == "json" or subtype.endswith("+json")):
        raise InvalidRequest.of("body", f"is of type {shown(content_type)}; expected application/json")
    try:
        text = data.decode("utf-8-sig")
        _require_few_parts(text)
        return json.loads(text, parse_int=_whole, parse_float=_real)
    except UnicodeDecodeError as error:
        problem = f"is no UTF-8: the byte {error.object[error.start]:#04x} at {error.start}"
        raise InvalidRequest.of("body", problem) from None
    except json.JSONDecodeError as error:
        raise InvalidRequest.of("body", f"is no JSON: {error.msg} at {error.pos}") from None
    except RecursionError:
        raise InvalidRequest.of("body", "is no JSON that can be read: it is too deep") from None
