"""Bodies of all routes: bytes to fields to requests, which `server.admission` validates. Also the body of `/generate`.

The other fields of a body with invalid fields are still checked, so that one error lists all violations.
"""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import islice
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from pilotfish.engine.errors import InvalidRequest, Violation
from pilotfish.engine.params import (
    Guided,
    OutputOptions,
    SamplingParams,
    SpeculationMode,
    SpeculationParams,
    Verification,
)
from pilotfish.engine.types import ReceivedOutput, Request
from pilotfish.server.admission.admission import Reader
from pilotfish.server.admission.check import NO_TOKENS, Prompt
from pilotfish.server.chat import Conversation
from pilotfish.server.errors import QueueFull
from pilotfish.server.formats.base import ANY_OBJECT, NO_ARGUMENTS, Tool
from pilotfish.server.http.errors import violations
from pilotfish.server.http.event_ids import parse_event_id
from pilotfish.server.http.fields import (
    MAX_BIASES,
    MAX_CHOICES,
    MAX_TEXTS,
    TEXT_OR_LIST,
    TEXT_OR_OBJECT,
    Body,
    ByType,
    Flag,
    Ids,
    Int32,
    Real,
    Schema,
    Seconds,
    Seed,
    Text,
    Texts,
    TokenKey,
    UInt32,
    at_most,
    text_of,
)
from pilotfish.server.model import ServedModel
from pilotfish.server.streams.stream import NOTHING_RECEIVED

Input: TypeAlias = str | tuple[int, ...] | Conversation

OPENAI_TEMPERATURE = 1.0
_GROUP = re.compile(r"^(sampling|stopping|output|messages)\.")  # HTTP bodies do not have the groups of gRPC


class SpeculationFields(Body):
    """Speculation options, named as over gRPC."""

    mode: SpeculationMode | None = None
    num_draft_tokens: UInt32 | None = None
    proposer: Text | None = None
    verification: Verification | None = None


Choices = Annotated[list[Text], Field(fail_fast=True), at_most(MAX_CHOICES)]


class TextPart(Body):
    """A text part of a message."""

    type: Literal["text"]
    text: Text


TextParts = Annotated[list[Annotated[TextPart, ByType()]], Field(fail_fast=True), at_most(MAX_TEXTS)]
TextContent = Annotated[Text | TextParts, TEXT_OR_LIST]


class PredictionBody(Body):
    """An expected output."""

    type: Literal["content"]
    content: TextContent


class StructuredOutputs(Body):
    """The structure of the text, in one of several notations."""

    json_: Annotated[Text | Schema, TEXT_OR_OBJECT] | None = Field(None, alias="json")
    json_object: Flag = False  # any JSON object
    regex: Text | None = None
    grammar: Text | None = None
    choice: Choices | None = None


def _one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


# Fields of the same name and meaning in bodies and in `SamplingParams`.
_SAMPLING = {field.name for field in fields(SamplingParams)} - {"guided", "max_tokens", "logprobs", "prompt_logprobs"}


class GenerationFields(Body):
    """Fields of every generating route, named as in gRPC, without its groups."""

    # The input field, and a placeholder for an invalid input; None: only invalid fields of a body are reported.
    no_input: ClassVar[tuple[str, Any] | None] = ("prompt", "")
    usual_temperature: ClassVar[float] = 0.0
    uses_model_defaults: ClassVar[bool] = False  # whether those of the checkpoint replace the API's
    # Patterns of gRPC field names, each with the name in the body, used if the body has that field.
    names: ClassVar[dict[str, str]] = {}

    model: Text | None = None
    temperature: Real | None = None
    top_p: Real | None = None
    top_k: UInt32 | None = None
    min_p: Real | None = None
    repetition_penalty: Real | None = None
    presence_penalty: Real | None = None
    frequency_penalty: Real | None = None
    logit_bias: Annotated[dict[TokenKey, Real], at_most(MAX_BIASES)] | None = None
    allowed_token_ids: Ids | None = None
    banned_token_ids: Ids | None = None
    seed: Seed | None = None
    min_tokens: UInt32 | None = None
    stop: Annotated[Texts, BeforeValidator(_one_or_many)] | None = None
    stop_token_ids: Ids | None = None
    ignore_eos: Flag | None = None
    guided_json: Annotated[Text | Schema, TEXT_OR_OBJECT] | None = None
    guided_regex: Text | None = None
    guided_grammar: Text | None = None
    guided_choice: Choices | None = None
    structured_outputs: StructuredOutputs | None = None
    skip_special_tokens: Flag | None = None
    prediction: Annotated[Text | PredictionBody, TEXT_OR_OBJECT] | None = None
    cache_salt: Text | None = None
    speculation: SpeculationFields = SpeculationFields()
    priority: Int32 | None = None
    stream: Flag = False
    event_ids: Flag = False  # send an id with each event, for the header Last-Event-ID
    timeout: Seconds | None = None

    def conflicts(self) -> Iterator[Violation]:
        """Yield a violation for valid fields that exclude each other."""
        given = [field for field, _ in self.structures()]
        if len(given) > 1:
            yield Violation("body", f"has {' and '.join(given)}; expected one structure")

    def called(self, field: str) -> str:
        """Return the body's name of a gRPC field."""
        field = _GROUP.sub("", field)
        for pattern, name in self.names.items():
            theirs, is_other = re.subn(rf"^({pattern})(?!\w)", name, field)
            if is_other and re.split(r"\W", theirs)[0] in self.model_fields_set:
                return theirs
        structure, _ = next(self.structures(), ("guided", None))
        return re.sub(r"^guided(\.\w+)*", structure, field)

    def structures(self) -> Iterator[tuple[str, Guided]]:
        """Yield the requested structures of the text, each with its field; more than one is a conflict."""
        wanted = {} if self.structured_outputs is None else self.structured_outputs.model_dump(by_alias=True)
        if wanted.get("json_object"):
            yield "structured_outputs.json_object", Guided(json_schema=ANY_OBJECT)
        for kind in ("json", "regex", "grammar", "choice"):
            own = f"guided_{kind}"
            for name, value in ((own, getattr(self, own)), (f"structured_outputs.{kind}", wanted.get(kind))):
                if value is not None:
                    yield name, _guided(kind, value)

    @property
    @abstractmethod
    def prompts(self) -> list[Input]:
        """The prompts: one in most bodies. Raises InvalidRequest for an invalid conversation."""

    @property
    def predicted(self) -> str | None:
        """The text of the prediction."""
        given = self.prediction
        return text_of(given.content) if isinstance(given, PredictionBody) else given

    @abstractmethod
    def request(self) -> Request:
        """Return the request, without its prompt."""

    def limited(self, max_tokens: int | None) -> Request:
        """Return a request with the fields of all routes."""
        given = {name: getattr(self, name, None) for name in _SAMPLING}
        named: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in given.items()
            if value is not None
        }
        named.setdefault("temperature", self.usual_temperature)
        _, structure = next(self.structures(), ("", None))
        return Request(
            model=self.model,
            sampling=SamplingParams(guided=structure, max_tokens=max_tokens, **named),
            speculation=SpeculationParams(**dict(self.speculation)),
            output=OutputOptions(digests=self.event_ids, skip_special_tokens=self.skip_special_tokens),
            cache_salt=self.cache_salt,
            priority=self.priority or 0,
        )


def _guided(kind: str, source: Any) -> Guided:
    if kind == "choice":
        return Guided(choice=tuple(source))
    text = source if isinstance(source, str) else json.dumps(source)
    named: Any = {"json_schema" if kind == "json" else kind: text}
    return Guided(**named)


def template_arguments(effort: str | None, verbosity: str | None = None, named: dict[str, Any] | None = None) -> str:
    """Return further template variables as JSON. Explicit ones override those that other fields imply.

    Most templates can only switch reasoning on or off.
    """
    found: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    found |= {"enable_thinking": False} if effort == "none" else {}
    found |= {} if verbosity is None else {"verbosity": verbosity}
    found |= named or {}
    return json.dumps(found)


class FunctionBody(Body):
    """A function that the model may call."""

    name: Text
    description: Text = ""
    parameters: Schema | None = None
    strict: Flag = False

    @property
    def declared(self) -> Tool:
        schema = NO_ARGUMENTS if self.parameters is None else json.dumps(self.parameters)
        return Tool(self.name, self.description, schema, self.strict)


class GenerateBody(GenerationFields):
    """Body of `POST /generate`."""

    names: ClassVar = {"max_tokens": "max_new_tokens", r"speculation\.num_draft_tokens": "k_draft"}

    prompt: Text
    max_new_tokens: UInt32 | None = None
    k_draft: UInt32 | None = None

    @property
    def prompts(self) -> list[Input]:
        return [self.prompt]

    def request(self) -> Request:
        """Convert the body. `k_draft` is the number of drafts in each round; 0 turns speculation off."""
        request = self.limited(self.max_new_tokens)
        if self.k_draft is None:
            return request
        mode = SpeculationMode.FIXED if self.k_draft else SpeculationMode.OFF
        return replace(request, speculation=replace(request.speculation, num_draft_tokens=self.k_draft, mode=mode))


BodyT = TypeVar("BodyT", bound=GenerationFields)
FieldsT = TypeVar("FieldsT", bound=BaseModel)


@dataclass(slots=True)
class ParsedBody(Generic[BodyT]):
    """The valid fields of a body, its request, its prompts, and the violations found so far."""

    body: BodyT
    request: Request
    prompts: list[Input]
    wrong: list[Violation] = field(default_factory=list)

    @property
    def readers(self) -> list[Reader]:
        """Functions that return the request of each prompt, with the violations found so far."""
        return [partial(self._read, i, prompt) for i, prompt in enumerate(self.prompts)]

    def _read(
        self, i: int, prompt: Input, _: ServedModel, found: list[Violation]
    ) -> tuple[Request, Prompt, str | None]:
        found += self.wrong
        request = replace(self.request, token_ids=prompt) if isinstance(prompt, tuple) else self.request
        if i and request.request_id:
            request = replace(request, request_id=f"{request.request_id}-{i}")
        return request, None if isinstance(prompt, tuple) else prompt, self.body.predicted

    @property
    def conversation(self) -> Conversation:
        """The conversation of a conversation route."""
        (prompt,) = self.prompts
        assert isinstance(prompt, Conversation), "a route for conversations"
        return prompt

    @contextmanager
    def naming(self, prompt: int = 0) -> Iterator[None]:
        """Context in which errors use the body's field names, and name the prompt if there are several."""
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

    def complete(self, defaults: Mapping[str, Any]) -> None:
        """Fill in the model's default sampling parameters where the body has none."""
        if not self.body.uses_model_defaults:
            return
        sampling = self.request.sampling
        missing = {name: value for name, value in defaults.items() if getattr(self.body, name, None) is None}
        if sampling.max_tokens is not None:  # by any of its names
            missing.pop("max_tokens", None)
        elif "max_tokens" in missing:  # a recommendation: the room of the context may be smaller
            missing |= {"max_tokens": max(missing["max_tokens"], sampling.min_tokens), "fit_context": True}
        if missing:
            self.request = replace(self.request, sampling=replace(sampling, **missing))

    def resume_after(self, event_id: str, max_n: int) -> None:
        """Resume the stream after the event with this id.

        Finished outputs are regenerated, too, because the usage at the end includes them.
        """
        sampling = self.request.sampling
        if not self.body.stream:
            self.refuse("Last-Event-ID", "resumes a stream; it requires stream: true")
        if len(self.prompts) > 1:
            self.refuse("Last-Event-ID", f"resumes a stream with one prompt; the body has {len(self.prompts)}")
        try:
            seed, resume = parse_event_id(event_id, max_n)
        except InvalidRequest as invalid:
            self.wrong += invalid.violations
            return
        if sampling.seed not in (None, seed):
            self.refuse("seed", f"is {sampling.seed}; the stream of Last-Event-ID has seed {seed}")
        if len(resume.outputs) > sampling.n:
            self.refuse("resume.outputs", f"has {len(resume.outputs)} outputs; sampling.n is {sampling.n}")
        if self.wrong or sampling.n > max_n:
            return  # already a violation, so the received outputs are not needed
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


def read_body(kind: type[BodyT], data: bytes) -> ParsedBody[BodyT]:
    """Return fields, request and violations. Raises InvalidRequest if the body is not an object."""
    found = read_json(data)
    try:
        return _asked(kind.model_validate(found))
    except ValidationError as error:
        errors = error.errors(include_url=False)[:MAX_ERRORS]
    wrong = violations(errors)
    if any(not about["loc"] for about in errors):
        del found  # it can be a hundred megabytes, and the traceback would keep it alive
        raise InvalidRequest(wrong)
    if kind.no_input is None:
        return ParsedBody(kind.model_construct(), Request(), [NO_TOKENS], wrong)
    (input_field, nothing), faulty = kind.no_input, {about["loc"][0] for about in errors}
    valid = {name: value for name, value in found.items() if name not in faulty}
    has_input = valid.get(input_field) is not None
    read = _asked(kind.model_validate(valid if has_input else valid | {input_field: nothing}))
    return replace(read, prompts=read.prompts if has_input else [NO_TOKENS], wrong=wrong + read.wrong)


def _asked(body: BodyT) -> ParsedBody[BodyT]:
    """Convert a body whose fields are valid."""
    try:
        return ParsedBody(body, body.request(), body.prompts, list(body.conflicts()))
    except InvalidRequest as invalid:  # of a conversation
        return ParsedBody(body, Request(), [NO_TOKENS], list(invalid.violations))


MAX_JSON_PARTS = 200_000  # strings, lists and objects: each takes up to two hundred bytes when parsed
_PARTS = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[{]', re.DOTALL)
MAX_DIGITS = 1000  # of an integer: parsing takes quadratic time, and no field needs more
MAX_ERRORS = 100  # violations that are converted; a response has room for fewer


def fields_of(kind: type[FieldsT], data: bytes) -> FieldsT:
    """Return the fields of a body. Raises InvalidRequest with all violations."""
    try:
        return kind.model_validate(read_json(data))
    except ValidationError as error:
        wrong = violations(error.errors(include_url=False)[:MAX_ERRORS])
    raise InvalidRequest(wrong)


def _require_few_parts(text: str) -> None:
    """Limit the number of parts of a JSON text before it is parsed, to limit memory."""
    if text.count('"') // 2 + text.count("[") + text.count("{") <= MAX_JSON_PARTS:
        return  # the usual case, a cheaper check
    found = sum(1 for _ in islice(_PARTS.finditer(text), MAX_JSON_PARTS + 1))
    if found > MAX_JSON_PARTS:
        raise InvalidRequest.of("body", f"has more than {MAX_JSON_PARTS} strings, lists and objects")


def _whole(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise InvalidRequest.of("body", f"is not valid JSON: a number has {len(digits)} digits")
    return int(digits)


def _real(digits: str) -> float:
    """Convert like Python's parser, but let other threads run between two numbers."""
    return float(digits)


def read_json(data: bytes) -> Any:
    """Decode JSON. Raises InvalidRequest."""
    try:
        text = data.decode("utf-8-sig")
        _require_few_parts(text)
        return json.loads(text, parse_int=_whole, parse_float=_real)
    except UnicodeDecodeError as error:
        problem = f"is not UTF-8: the byte {error.object[error.start]:#04x} at {error.start}"
        raise InvalidRequest.of("body", problem) from None
    except json.JSONDecodeError as error:
        raise InvalidRequest.of("body", f"is not valid JSON: {error.msg} at {error.pos}") from None
    except RecursionError:
        raise InvalidRequest.of("body", "is not valid JSON: it is nested too deeply") from None
