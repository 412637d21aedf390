"""From the bytes of a body to requests, which `server.admission` checks. Knows no route.

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
from functools import partial
from itertools import islice
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from engine.errors import InvalidRequest, Violation, shown
from engine.types import ReceivedOutput, Request
from server.admission.admission import Reader
from server.admission.check import NO_TOKENS, Prompt
from server.chat import Conversation
from server.errors import QueueFull
from server.http.bodies import GenerationFields, Input
from server.http.errors import violations
from server.http.event_ids import parse_event_id
from server.model import ServedModel
from server.streams.stream import NOTHING_RECEIVED

BodyT = TypeVar("BodyT", bound=GenerationFields)
FieldsT = TypeVar("FieldsT", bound=BaseModel)


@dataclass(slots=True)
class ParsedBody(Generic[BodyT]):
    """A body, as far as its fields are valid; its request, its prompts, and the violations known already."""

    body: BodyT
    request: Request
    prompts: list[Input]
    wrong: list[Violation] = field(default_factory=list)

    @property
    def readers(self) -> list[Reader]:
        """What returns the request of each prompt, with the violations that are known already."""
        return [partial(self._read, prompt) for prompt in self.prompts]

    def _read(self, prompt: Input, _: ServedModel, found: list[Violation]) -> tuple[Request, Prompt, str | None]:
        found += self.wrong
        request = replace(self.request, token_ids=prompt) if isinstance(prompt, tuple) else self.request
        return request, None if isinstance(prompt, tuple) else prompt, self.body.predicted

    @property
    def conversation(self) -> Conversation:
        """The prompt of a route for conversations."""
        (prompt,) = self.prompts
        assert isinstance(prompt, Conversation), "a route for conversations"
        return prompt

    @contextmanager
    def naming(self, prompt: int = 0) -> Iterator[None]:
        """Within it errors have the caller's names of fields, and name the prompt if it is one of several."""
        name = f"prompt[{prompt}]" if len(self.prompts) > 1 else ""
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

    def resume_after(self, event_id: str, max_n: int) -> None:
        """Continue the stream after the event with this id.

        Outputs that were finished are computed again, too, because the usage at the end includes them.
        """
        sampling = self.request.sampling
        if not self.body.stream:
            self.refuse("Last-Event-ID", "continues a stream; it needs stream: true")
        if len(self.prompts) > 1:
            self.refuse("Last-Event-ID", f"continues a stream of one prompt; the body has {len(self.prompts)}")
        try:
            seed, resume = parse_event_id(event_id, max_n)
        except InvalidRequest as invalid:
            self.wrong += invalid.violations
            return
        if sampling.seed not in (None, seed):
            self.refuse("seed", f"is {sampling.seed}; the stream that Last-Event-ID names has {seed}")
        if len(resume.outputs) > sampling.n:
            self.refuse("resume.outputs", f"has {len(resume.outputs)} outputs; sampling.n is {sampling.n}")
        if self.wrong or sampling.n > max_n:
            return  # the request is refused, and so is not compared with what this server would send
        missing = sampling.n - len(resume.outputs)
        outputs = (*map(_computed_again, resume.outputs), *(NOTHING_RECEIVED,) * missing)
        self.request = replace(
            self.request, sampling=replace(sampling, seed=seed), resume=replace(resume, outputs=outputs)
        )

    def refuse(self, field: str, problem: str) -> None:
        self.wrong.append(Violation(field, problem))


def _computed_again(output: ReceivedOutput) -> ReceivedOutput:
    has_ended = output.has_ended
    return replace(output, tail=output.tail or has_ended, has_ended=False, recount=has_ended)


def read_body(kind: type[BodyT], data: bytes, content_type: str) -> ParsedBody[BodyT]:
    """Return the fields, the request that they make, and what is wrong. Raises InvalidRequest if it is no object."""
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
        return ParsedBody(kind.model_construct(), Request(), [NO_TOKENS], wrong)
    faulty = {about["loc"][0] for about in errors}
    read = _rest(kind, {name: value for name, value in found.items() if name not in faulty}, *kind.no_input)
    read.wrong[:0] = wrong
    return read


def _asked(body: BodyT) -> ParsedBody[BodyT]:
    """Convert a body whose fields are valid by themselves."""
    try:
        return ParsedBody(body, body.request(), body.prompts, list(body.conflicts()))
    except InvalidRequest as invalid:  # of a conversation
        return ParsedBody(body, Request(), [NO_TOKENS], list(invalid.violations))


def _rest(kind: type[BodyT], found: dict[str, Any], input_field: str, nothing: Any) -> ParsedBody[BodyT]:
    """Convert the valid fields of a body. If they have no input, it is `nothing` here, and the request has none."""
    has_input = found.get(input_field) is not None
    read = _asked(kind.model_validate(found if has_input else found | {input_field: nothing}))
    if not has_input:
        read.prompts = [NO_TOKENS]
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
    """Decode JSON; the content type has to be JSON, so that no web page can send it to another site."""
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
