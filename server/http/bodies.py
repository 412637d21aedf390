"""The base of the bodies of all routes, and `/generate`'s own: fields, and the request that they make.

Every body converts itself (`request`, `prompts`); `server.admission` checks the values.
"""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BeforeValidator, Field

from engine.errors import Violation
from engine.params import (
    Guided,
    OutputOptions,
    SamplingParams,
    SpeculationMode,
    SpeculationParams,
    Verification,
)
from engine.types import Request
from server.chat import Conversation
from server.formats.base import ANY_OBJECT, Tool
from server.http.fields import (
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

Input: TypeAlias = str | tuple[int, ...] | Conversation

OPENAI_TEMPERATURE = 1.0
_GROUP = re.compile(r"^(sampling|stopping|output|messages)\.")  # the groups of gRPC are not in HTTP bodies


class SpeculationFields(Body):
    """Speculation options, named as over gRPC."""

    mode: SpeculationMode | None = None
    num_draft_tokens: UInt32 | None = None
    proposer: Text | None = None
    verification: Verification | None = None


Choices = Annotated[list[Text], Field(fail_fast=True), at_most(MAX_CHOICES)]


class TextPart(Body):
    """A part of a message that is text."""

    type: Literal["text"]
    text: Text


TextParts = Annotated[list[Annotated[TextPart, ByType()]], Field(fail_fast=True), at_most(MAX_TEXTS)]
TextContent = Annotated[Text | TextParts, TEXT_OR_LIST]


class PredictionBody(Body):
    """An expected output."""

    type: Literal["content"]
    content: TextContent


class StructuredOutputs(Body):
    """A structure of the text, in one of several notations."""

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
    """Fields of every generating route, named as over gRPC, but without its groups."""

    # The input field, and a placeholder for an invalid input; None: only the wrong fields of a body are reported.
    no_input: ClassVar[tuple[str, Any] | None] = ("prompt", "")
    usual_temperature: ClassVar[float] = 0.0
    # Patterns of fields that gRPC calls differently, each with what the caller calls it if the body has that field.
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
    event_ids: Flag = False  # give events of a stream ids; see the header Last-Event-ID
    timeout: Seconds | None = None

    def conflicts(self) -> Iterator[Violation]:
        """Yield a violation for fields that are valid by themselves but exclude each other."""
        given = [field for field, _ in self.structures()]
        if len(given) > 1:
            yield Violation("body", f"has {' and '.join(given)}; expected one structure")

    def called(self, field: str) -> str:
        """Return what the caller calls a field of gRPC."""
        field = _GROUP.sub("", field)
        for pattern, name in self.names.items():
            theirs, is_other = re.subn(rf"^({pattern})(?!\w)", name, field)
            if is_other and re.split(r"\W", theirs)[0] in self.model_fields_set:
                return theirs
        structure, _ = next(self.structures(), ("guided", None))
        return re.sub(r"^guided(\.\w+)*", structure, field)

    def structures(self) -> Iterator[tuple[str, Guided]]:
        """Yield the structures that the text is to have, each with its field; more than one are a conflict."""
        wanted = {} if self.structured_outputs is None else self.structured_outputs.model_dump(by_alias=True)
        if wanted.get("json_object"):
            yield "structured_outputs.json_object", Guided(json_schema=ANY_OBJECT)
        for kind in ("json", "regex", "grammar", "choice"):
            named = f"guided_{kind}"
            for field, value in ((named, getattr(self, named)), (f"structured_outputs.{kind}", wanted.get(kind))):
                if value is not None:
                    yield field, _guided(kind, value)

    @property
    @abstractmethod
    def prompts(self) -> list[Input]:
        """The prompts: one in most bodies. Raises InvalidRequest for a wrong conversation."""

    @property
    def predicted(self) -> str | None:
        """The text of the prediction."""
        given = self.prediction
        return text_of(given.content) if isinstance(given, PredictionBody) else given

    @abstractmethod
    def request(self) -> Request:
        """Return the request, without its prompt."""

    def limited(self, max_tokens: int | None) -> Request:
        """Return a request of the fields that all routes have."""
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
    return Guided(**{"json_schema" if kind == "json" else kind: text})


def template_arguments(effort: str | None, verbosity: str | None = None, named: dict[str, Any] | None = None) -> str:
    """Return more variables of the template as JSON. Those that the caller names go before those that fields imply.

    Most templates can switch reasoning on or off, without degrees.
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
        schema = ANY_OBJECT if self.parameters is None else json.dumps(self.parameters)
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
        """Convert the body. `k_draft` is the number of drafts in every round; 0 turns speculation off."""
        request = self.limited(self.max_new_tokens)
        if self.k_draft is None:
            return request
        mode = SpeculationMode.FIXED if self.k_draft else SpeculationMode.OFF
        return replace(request, speculation=replace(request.speculation, num_draft_tokens=self.k_draft, mode=mode))
