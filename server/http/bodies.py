"""The base of the bodies of all routes, and `/generate`'s own: fields, and the message of the protocol that they make.

Every body converts itself (`requests`); `server.admission` checks the values.
"""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from engine.errors import Violation
from pilotfish.v1 import generation_pb2 as pb
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

OPENAI_TEMPERATURE = 1.0
_GROUP = re.compile(r"^(sampling|stopping|output|messages)\.")  # the protocol's groups are not in HTTP bodies


class SpeculationFields(Body):
    """Speculation options, named as in the protocol."""

    mode: Literal["auto", "off", "fixed"] | None = None
    num_draft_tokens: UInt32 | None = None
    proposer: Text | None = None
    verification: Literal["coupled", "rejection"] | None = None


ANY_OBJECT = {"type": "object"}
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


def _as_prediction(value: Any) -> Any:
    return {"type": "content", "content": value} if isinstance(value, str) else value


class StructuredOutputs(Body):
    """A structure of the text, in one of several notations."""

    json_: Annotated[Text | Schema, TEXT_OR_OBJECT] | None = Field(None, alias="json")
    json_object: Flag = False  # any JSON object
    regex: Text | None = None
    grammar: Text | None = None
    choice: Choices | None = None


def _one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


@dataclass(frozen=True, slots=True)
class Structure:
    """A structure of the text: the field that asks for it, its notation, and its source."""

    field: str
    kind: str  # "json", "regex", "grammar" or "choice"
    source: Any


class GenerationFields(Body):
    """Fields of every generating route, named as in the protocol, but without its groups."""

    # The input field, and a placeholder for an invalid input; None: nothing more is said of a body with a wrong field.
    no_input: ClassVar[tuple[str, Any] | None] = ("prompt", "")
    usual_temperature: ClassVar[float] = 0.0

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
    prediction: Annotated[PredictionBody, BeforeValidator(_as_prediction)] | None = None
    cache_salt: Text | None = None
    speculation: SpeculationFields | None = None
    priority: Int32 | None = None
    stream: Flag = False
    event_ids: Flag = False  # give events of a stream ids; see the header Last-Event-ID
    timeout: Seconds | None = None

    def conflicts(self) -> Iterator[Violation]:
        """Yield a violation for fields that are valid by themselves but exclude each other."""
        given = [structure.field for structure in self.structures()]
        if len(given) > 1:
            yield Violation("body", f"has {' and '.join(given)}; expected one structure")

    def names(self) -> dict[str, str]:
        """Return patterns of fields that the protocol calls differently, each with what the caller calls it."""
        given = next(self.structures(), None)
        return {} if given is None else {r"guided(\.\w+)*": given.field}

    def called(self, field: str) -> str:
        """Return what the caller calls a field of the protocol."""
        field = _GROUP.sub("", field)
        for pattern, name in self.names().items():
            theirs, is_other = re.subn(rf"^({pattern})(?!\w)", name, field)
            if is_other:
                return theirs
        return field

    def structures(self) -> Iterator[Structure]:
        """Yield the structures that the text is to have; more than one are a conflict."""
        wanted = {} if self.structured_outputs is None else self.structured_outputs.model_dump(by_alias=True)
        if wanted.get("json_object"):
            yield Structure("structured_outputs.json_object", "json", ANY_OBJECT)
        for kind in ("json", "regex", "grammar", "choice"):
            named = f"guided_{kind}"
            for field, value in ((named, getattr(self, named)), (f"structured_outputs.{kind}", wanted.get(kind))):
                if value is not None:
                    yield Structure(field, kind, value)

    @abstractmethod
    def requests(self) -> list[pb.GenerateRequest]:
        """Return a message for each prompt. Raises InvalidRequest for a conversation that no message can have."""

    def request(self, max_tokens: int | None) -> pb.GenerateRequest:
        """Return a message with the fields that all routes have; the input is still missing."""
        allowed, predicted = self.allowed_token_ids, self.prediction
        sampling = {
            "temperature": self.usual_temperature if self.temperature is None else self.temperature,
            "allowed_token_ids": None if allowed is None else pb.TokenIds(ids=allowed),
        }
        return pb.GenerateRequest(
            model=self.model,
            sampling=pb.SamplingParams(**_named(self, pb.SamplingParams) | sampling),
            stopping=pb.StoppingParams(**_named(self, pb.StoppingParams) | {"max_tokens": max_tokens}),
            speculation=_speculation(self.speculation),
            guided=_guided(next(self.structures(), None)),
            cache_salt=self.cache_salt,
            priority=self.priority,
            output=pb.OutputOptions(digests=self.event_ids, skip_special_tokens=self.skip_special_tokens),
            prediction=None if predicted is None else pb.Prediction(text=text_of(predicted.content)),
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


def _guided(structure: Structure | None) -> pb.GuidedDecoding | None:
    if structure is None:
        return None
    if structure.kind == "choice":
        return pb.GuidedDecoding(choice=pb.Choice(choices=structure.source))
    source = structure.source if isinstance(structure.source, str) else json.dumps(structure.source)
    named: Any = {"json_schema" if structure.kind == "json" else structure.kind: source}
    return pb.GuidedDecoding(**named)


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


class FunctionBody(Body):
    """A function that the model may call."""

    name: Text
    description: Text = ""
    parameters: Schema | None = None
    strict: Flag = False

    @property
    def declared(self) -> pb.Tool:
        schema = "" if self.parameters is None else json.dumps(self.parameters)
        return pb.Tool(name=self.name, description=self.description, parameters=schema, strict=self.strict)


class GenerateBody(GenerationFields):
    """Body of `POST /generate`."""

    prompt: Text
    max_new_tokens: UInt32 | None = None
    k_draft: UInt32 | None = None

    def names(self) -> dict[str, str]:
        drafts = {} if self.k_draft is None else {r"speculation\.num_draft_tokens": "k_draft"}
        return super().names() | {"max_tokens": "max_new_tokens"} | drafts

    def requests(self) -> list[pb.GenerateRequest]:
        """Convert the body. `k_draft` is the number of drafts in every round; 0 turns speculation off."""
        request = self.request(self.max_new_tokens)
        request.prompt = self.prompt
        if self.k_draft is not None:
            request.speculation.num_draft_tokens = self.k_draft
            request.speculation.mode = pb.SPECULATION_MODE_FIXED if self.k_draft else pb.SPECULATION_MODE_OFF
        return [request]
