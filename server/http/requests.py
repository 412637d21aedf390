"""From the bytes of a body to messages of the protocol, which `server.admission` checks. Knows no route.

If some fields of a body are invalid by themselves, the other fields are still checked, so that one error lists all
violations.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from email.message import Message
from itertools import islice
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from engine.errors import InvalidRequest, Violation, shown
from pilotfish.v1 import generation_pb2 as pb
from server.admission.resume import parse_event_id
from server.errors import QueueFull
from server.http.bodies import GenerationFields
from server.http.errors import violations

BodyT = TypeVar("BodyT", bound=GenerationFields)
FieldsT = TypeVar("FieldsT", bound=BaseModel)


@dataclass(slots=True)
class ParsedBody(Generic[BodyT]):
    """A body, as far as its fields are valid; the message of each of its prompts, and the violations known already."""

    body: BodyT
    messages: list[pb.GenerateRequest]
    wrong: list[Violation] = field(default_factory=list)

    @contextmanager
    def naming(self, prompt: int = 0) -> Iterator[None]:
        """Within it errors have the caller's names of fields, and name the prompt if it is one of several."""
        name = f"prompt[{prompt}]" if len(self.messages) > 1 else ""
        try:
            yield
        except InvalidRequest as invalid:
            raise InvalidRequest(self._named(violation, name) for violation in invalid.violations) from None
        except QueueFull as full:
            if name:
                full.args = (f"{name}: {full}",)
            raise

    def _named(self, wrong: Violation, prompt: str) -> Violation:
        if wrong in self.wrong:
            return wrong
        of_prompt = re.fullmatch(r"(?:prompt|token_ids)(\[\d+\])?", wrong.field)
        if prompt and of_prompt is not None:
            return replace(wrong, field=f"{prompt}{of_prompt[1] or ''}")
        problem = f"{wrong.problem} (in the request of {prompt})" if prompt else wrong.problem
        return replace(wrong, field=self.body.called(wrong.field), problem=problem)

    def resume_after(self, event_id: str, max_n: int) -> pb.Resume | None:
        """Continue the stream after the event with this id; return what was received, or None if the id is wrong.

        Outputs that were finished are computed again, too, because the usage at the end includes them.
        """
        message, *others = self.messages
        if not self.body.stream:
            self.refuse("Last-Event-ID", "continues a stream; it needs stream: true")
        if others:
            self.refuse("Last-Event-ID", f"continues a stream of one prompt; the body has {1 + len(others)}")
        try:
            seed, resume = parse_event_id(event_id, max_n)
        except InvalidRequest as invalid:
            self.wrong += invalid.violations
            return None
        if message.sampling.HasField("seed") and message.sampling.seed != seed:
            self.refuse("seed", f"is {message.sampling.seed}; the stream that Last-Event-ID names has {seed}")
        if self.wrong:
            return None  # the request is refused, and so is not compared with what this server would send
        message.sampling.seed = seed
        message.resume.CopyFrom(resume)
        for output in message.resume.outputs:
            output.tail, output.recount = output.tail or output.finished, True
        return resume

    def refuse(self, field: str, problem: str) -> None:
        self.wrong.append(Violation(field, problem))


def read_body(kind: type[BodyT], data: bytes, content_type: str) -> ParsedBody[BodyT]:
    """Return the fields, the messages that they make, and what is wrong. Raises InvalidRequest if it is no object."""
    found = read_json(data, content_type)
    try:
        return _asked(kind.model_validate(found))
    except ValidationError as error:
        errors = error.errors(include_url=False)[:MAX_ERRORS]
    wrong = violations(errors)
    if any(not about["loc"] for about in errors):
        del found  # it can have a hundred megabytes, and the traceback would keep it
        raise InvalidRequest(wrong)
    if kind.no_input is None:
        return ParsedBody(kind.model_construct(), [pb.GenerateRequest()], wrong)
    faulty = {about["loc"][0] for about in errors}
    read = _rest(kind, {name: value for name, value in found.items() if name not in faulty}, *kind.no_input)
    read.wrong[:0] = wrong
    return read


def _asked(body: BodyT) -> ParsedBody[BodyT]:
    """Convert a body whose fields are valid by themselves."""
    try:
        return ParsedBody(body, body.requests(), list(body.conflicts()))
    except InvalidRequest as invalid:  # of a conversation
        return ParsedBody(body, [pb.GenerateRequest()], list(invalid.violations))


def _rest(kind: type[BodyT], found: dict[str, Any], input_field: str, nothing: Any) -> ParsedBody[BodyT]:
    """Convert the valid fields of a body. If they have no input, it is `nothing` here, and the message has none."""
    has_input = found.get(input_field) is not None
    read = _asked(kind.model_validate(found if has_input else found | {input_field: nothing}))
    if not has_input:
        read.messages[0].ClearField("prompt")
        read.messages[0].ClearField("messages")
    return read


MAX_PARTS = 200_000  # strings, lists and objects: each takes up to two hundred bytes when it is made
_PARTS = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[{]', re.DOTALL)
MAX_DIGITS = 1000  # of a whole number: to read one takes a time that grows with the square, and none served has more
MAX_ERRORS = 100  # that are looked at; an answer has room for fewer


def fields_of(kind: type[FieldsT], data: bytes, content_type: str) -> FieldsT:
    """Return the fields of a body; InvalidRequest with all that is wrong with them."""
    try:
        return kind.model_validate(read_json(data, content_type))
    except ValidationError as error:
        wrong = violations(error.errors(include_url=False)[:MAX_ERRORS])
    raise InvalidRequest(wrong)


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
