"""From the bytes of a body to a message of the protocol, which `server.admission` checks. Knows no route.

If some fields of a body are invalid by themselves, the other fields are still checked, so that one error lists all
violations.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from email.message import Message
from functools import singledispatch
from itertools import islice
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from engine.errors import InvalidRequest, Violation, shown
from pilotfish.v1 import generation_pb2 as pb
from server.admission.resume import parse_event_id
from server.http.errors import violations
from server.http.fields import without_tags
from server.http.types import (
    ChatBody,
    ChatTurn,
    CompletionBody,
    FunctionBody,
    GenerateBody,
    GenerationFields,
    OpenAiBody,
    SpeculationFields,
    ToolChoiceBody,
    text_of,
)

OPENAI_TEMPERATURE = 1.0  # OpenAI's default; the default of `/generate` and gRPC is 0


@dataclass(frozen=True, slots=True)
class ParsedBody:
    """A body as a message, and the violations that are known already."""

    message: pb.GenerateRequest
    wrong: tuple[Violation, ...] = ()
    timeout: float | None = None  # seconds
    resume: pb.Resume | None = None  # what the caller received of an interrupted stream
    others: tuple[pb.GenerateRequest, ...] = ()  # of the prompts after the first
    called: Callable[[str], str] = str  # what the caller calls a field of the message

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Within it an InvalidRequest gets the caller's names of fields, which those in `wrong` have already."""
        try:
            yield
        except InvalidRequest as invalid:
            raise InvalidRequest(
                wrong if wrong in self.wrong else replace(wrong, field=self.called(wrong.field))
                for wrong in invalid.violations
            ) from None


def asked(body: GenerationFields) -> ParsedBody:
    """Convert a body whose fields are valid by themselves."""
    message, *others = messages_of(body)
    return ParsedBody(message, tuple(body.conflicts()), body.timeout, others=tuple(others), called=body.called)


def rest(kind: type[GenerationFields], found: Any, faulty: Iterable[str]) -> ParsedBody:
    """Convert a body, a JSON object, without its `faulty` fields; the message may have no input."""
    kept = {name: value for name, value in found.items() if name not in faulty}
    assert kind.no_input is not None, "such a body has no rest"
    field, nothing = kind.no_input
    has_input = kept.get(field) is not None
    body = kind.model_validate(kept if has_input else kept | {field: nothing})
    read = asked(body)
    if not has_input:
        read.message.ClearField("prompt")
        read.message.ClearField("messages")
    return read


def continued(read: ParsedBody, event_id: str, max_n: int) -> ParsedBody:
    """Make the request continue the stream after the event with this id; an invalid id is one more violation.

    Outputs that were finished are computed again, too, because the usage at the end includes them.
    """
    if read.others:
        wrong = Violation("Last-Event-ID", f"continues a stream of one prompt; the body has {1 + len(read.others)}")
        return replace(read, wrong=(*read.wrong, wrong))
    try:
        seed, resume = parse_event_id(event_id, max_n)
    except InvalidRequest as invalid:
        return replace(read, wrong=(*read.wrong, *invalid.violations))
    message = read.message
    if message.sampling.HasField("seed") and message.sampling.seed != seed:
        wrong = Violation("seed", f"is {message.sampling.seed}; the stream that Last-Event-ID names has {seed}")
        return replace(read, wrong=(*read.wrong, wrong))
    message.sampling.seed = seed
    message.resume.CopyFrom(resume)
    for output in message.resume.outputs:
        output.tail, output.recount = output.tail or output.finished, True
    return replace(read, resume=resume)


@singledispatch
def messages_of(body: GenerationFields) -> list[pb.GenerateRequest]:
    """Convert a body to one message for each of its prompts. Every kind of body registers its own conversion."""
    raise AssertionError(f"no route takes a {type(body).__name__}")


@messages_of.register
def _(body: GenerateBody) -> list[pb.GenerateRequest]:
    """Convert a body of `POST /generate`. `k_draft` is the number of drafts in every round; 0 turns speculation off."""
    request = common(body, body.max_new_tokens)
    request.prompt = body.prompt
    if body.k_draft is not None:
        request.speculation.num_draft_tokens = body.k_draft
        request.speculation.mode = pb.SPECULATION_MODE_FIXED if body.k_draft else pb.SPECULATION_MODE_OFF
    return [request]


@messages_of.register
def _(body: CompletionBody) -> list[pb.GenerateRequest]:
    """Convert a body of `POST /v1/completions`."""
    request = common(body, 1 if body.is_only_scored else body.max_tokens)  # one token is generated and left out
    _ask_as_openai(request, body)
    if body.logprobs is not None:
        request.output.logprobs, request.output.top_logprobs = True, body.logprobs
    if body.echo:
        request.output.prompt_logprobs = request.output.logprobs
        request.output.prompt_token_ids = True
    return [_with_prompt(request, prompt) for prompt in body.prompts]


def _with_prompt(request: pb.GenerateRequest, prompt: str | list[int]) -> pb.GenerateRequest:
    asked = pb.GenerateRequest()
    asked.CopyFrom(request)
    if isinstance(prompt, str):
        asked.prompt = prompt
    else:
        asked.token_ids.CopyFrom(pb.TokenIds(ids=prompt))
    return asked


@messages_of.register
def _(body: ChatBody) -> list[pb.GenerateRequest]:
    """Convert a body of `POST /v1/chat/completions`."""
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    request = common(body, limit)
    _ask_as_openai(request, body)
    request.messages.CopyFrom(conversation(body))
    request.stopping.stop_in_answer = True
    request.output.logprobs = bool(body.logprobs)
    request.output.top_logprobs = body.top_logprobs or 0
    return [request]


def _ask_as_openai(request: pb.GenerateRequest, body: OpenAiBody) -> None:
    if body.temperature is None:
        request.sampling.temperature = OPENAI_TEMPERATURE
    request.output.prompt_token_ids = body.has_running_usage  # their number is the usage before the end


def common(body: GenerationFields, max_tokens: int | None) -> pb.GenerateRequest:
    """Convert the fields that all routes have; the input is still missing."""
    allowed = body.allowed_token_ids
    return pb.GenerateRequest(
        model=body.model,
        sampling=pb.SamplingParams(
            **_named(body, pb.SamplingParams)
            | {"allowed_token_ids": None if allowed is None else pb.TokenIds(ids=allowed)}
        ),
        stopping=pb.StoppingParams(**_named(body, pb.StoppingParams) | {"max_tokens": max_tokens}),
        speculation=_speculation(body.speculation),
        guided=_guided(body),
        cache_salt=body.cache_salt,
        priority=body.priority,
        output=pb.OutputOptions(digests=body.event_ids, skip_special_tokens=body.skip_special_tokens),
        prediction=None if body.prediction is None else pb.Prediction(text=text_of(body.prediction.content)),
    )


def _named(body: Any, group: Any) -> dict[str, Any]:
    """Return the fields that a group of the protocol has under the same names; None for those that are not set."""
    return {field.name: getattr(body, field.name, None) for field in group.DESCRIPTOR.fields}


def _speculation(asked: SpeculationFields | None) -> pb.SpeculationOptions | None:
    if asked is None:
        return None
    enums = {
        "mode": asked.mode and f"SPECULATION_MODE_{asked.mode.upper()}",
        "verification": asked.verification and f"VERIFICATION_{asked.verification.upper()}",
    }
    return pb.SpeculationOptions(**_named(asked, pb.SpeculationOptions) | enums)


def _guided(body: GenerationFields) -> pb.GuidedDecoding | None:
    structure = next(body.structures(), None)
    if structure is None:
        return None
    if structure.kind == "choice":
        return pb.GuidedDecoding(choice=pb.Choice(choices=structure.source))
    source = structure.source if isinstance(structure.source, str) else json.dumps(structure.source)
    named: Any = {"json_schema" if structure.kind == "json" else structure.kind: source}
    return pb.GuidedDecoding(**named)


_ROLES = {"developer": "system", "function": "tool"}  # newer and older names, which few templates know


def conversation(body: ChatBody) -> pb.ChatMessages:
    """Convert the messages, the tools, and all that the template and the structure of the answer depend on."""
    return pb.ChatMessages(
        messages=map(_turn, body.messages),
        tools=[_tool(tool.function) for tool in body.tools],
        tool_choice=None if body.tool_choice is None else _tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        template_arguments=template_arguments(body.reasoning_effort, body.verbosity, body.chat_template_kwargs),
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        thinking_budget=body.thinking_token_budget if body.thinking_budget is None else body.thinking_budget,
    )


def template_arguments(
    effort: str | None, verbosity: str | None = None, named: dict[str, Any] | None = None
) -> str | None:
    """Return more variables of the template as JSON. Those that the caller names go before those that fields imply.

    Most templates have a switch for reasoning, and no degrees.
    """
    found: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    found |= {"enable_thinking": False} if effort == "none" else {}
    found |= {} if verbosity is None else {"verbosity": verbosity}
    found |= named or {}
    return json.dumps(found) if found else None


def _tool(function: FunctionBody) -> pb.Tool:
    schema = "" if function.parameters is None else json.dumps(function.parameters)
    return pb.Tool(name=function.name, description=function.description, parameters=schema, strict=function.strict)


def _tool_choice(choice: ToolChoiceBody) -> pb.ToolChoice:
    if choice.function is not None:
        return pb.ToolChoice(name=choice.function.name)
    return pb.ToolChoice(mode=pb.ToolChoiceMode.Value(f"TOOL_CHOICE_MODE_{choice.type.upper()}"))


def _turn(turn: ChatTurn) -> pb.ChatMessage:
    calls = [
        pb.ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments) for call in turn.tool_calls
    ]
    return pb.ChatMessage(
        role=_ROLES.get(turn.role, turn.role),
        content=text_of(turn.content),
        name=turn.name,
        tool_calls=calls,
        tool_call_id=turn.tool_call_id,
        reasoning=turn.thoughts,
    )


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
    """Return the fields, and the message that they make. Raises InvalidRequest if it is no JSON, or WrongBody."""
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
