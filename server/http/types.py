"""Fields of the bodies of the HTTP routes: names, types and defaults. `requests.py` interprets their values.

Unknown fields are refused by name, because most of them would change the output. A field that is null counts as
missing. So does an unsupported field of OpenAI if its value requests nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from engine.errors import Violation
from server.chat import MAX_MESSAGES


def _is_text(value: str) -> str:
    r"""Refuse text with half of a surrogate pair (`\ud800`), which JSON can contain but UTF-8 cannot."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"has {value[error.start]!r} at {error.start}, which is no character") from None
    return value


# Strict types: "3" and true are not accepted as numbers, and 1 is not accepted as a boolean.
UInt32 = Annotated[int, Field(ge=0, le=2**32 - 1, strict=True)]
Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31, strict=True)]
UInt64 = Annotated[int, Field(ge=0, le=2**64 - 1, strict=True)]
TokenKey = Annotated[int, Field(ge=0, le=2**32 - 1)]  # a key of a JSON object, where keys are strings; so not strict
Real = Annotated[float, Field(strict=True)]
Seconds = Annotated[float, Field(gt=0, strict=True)]
Flag = Annotated[bool, Field(strict=True)]
Text = Annotated[str, AfterValidator(_is_text)]

# Lists and objects are counted before their entries are looked at, and the first bad entry of a list ends its check.
MAX_FIELDS = 100  # of an object with known fields
MAX_TEXTS = 1024  # text parts of a message; stop strings, of which the server allows fewer
MAX_CHOICES = 65_536
MAX_BIASES = 16_384
MAX_IDS = 1 << 20
MAX_SCHEMA = 1 << 20  # characters and values; what the server allows is less
MAX_DEPTH = 128  # of a schema


def _at_most(most: int) -> BeforeValidator:
    def check(value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > most:
            raise ValueError(f"has {len(value)} entries; the limit is {most}")
        return value

    return BeforeValidator(check)


def _is_schema(value: dict[str, Any]) -> dict[str, Any]:
    """Refuse a schema that is too large or too deep for any server, or contains half of a surrogate pair."""
    level, left = list[Any]([value]), MAX_SCHEMA
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for part in level:
            if isinstance(part, dict):
                inner += part.keys()
                inner += part.values()
            elif isinstance(part, list):
                inner += part
            elif isinstance(part, str):
                left -= len(_is_text(part))
        left -= len(inner)
        if left < 0:
            raise ValueError(f"is larger than {MAX_SCHEMA} characters and values, which is the limit")
        if not inner:
            return value
        level = inner
    raise ValueError(f"is deeper than {MAX_DEPTH} levels, which is the limit")


Schema = Annotated[dict[str, Any], AfterValidator(_is_schema)]
Ids = Annotated[list[UInt32], Field(fail_fast=True), _at_most(MAX_IDS)]
Texts = Annotated[list[Text], Field(fail_fast=True), _at_most(MAX_TEXTS)]

# Fields about the caller, not about the output: they are accepted and have no effect.
IGNORED = frozenset(["user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"])
# Values of unsupported fields that request nothing.
NEUTRAL: dict[str, Any] = {
    "best_of": 1,
    "echo": False,
    "suffix": "",
    "tools": [],
    "tool_choice": "none",
    "parallel_tool_calls": True,
    "modalities": ["text"],
}


class Body(BaseModel):
    """Base of all parts of a body. It drops null fields and fields without effect, and refuses unknown ones."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, found: Any) -> Any:
        if not isinstance(found, dict):
            return found
        if len(found) > MAX_FIELDS:
            raise ValueError(f"has {len(found)} fields; the limit is {MAX_FIELDS}")
        fields = cls.model_fields
        return {
            name: value
            for name, value in found.items()
            if value is not None and (name in fields or not (name in IGNORED or _is_neutral(name, value)))
        }


def _is_neutral(name: str, value: Any) -> bool:
    return name in NEUTRAL and type(value) is type(NEUTRAL[name]) and value == NEUTRAL[name]


class SpeculationFields(Body):
    """Speculation options, named as in the protocol."""

    mode: Literal["auto", "off", "fixed"] | None = None
    num_draft_tokens: UInt32 | None = None
    proposer: Text | None = None
    verification: Literal["coupled", "rejection"] | None = None


class JsonSchema(Body):
    """A JSON schema. Its name and description are not used."""

    name: Text | None = None
    description: Text | None = None
    strict: Flag | None = None  # no effect: the schema is always enforced strictly
    schema_: Schema = Field(default_factory=lambda: {"type": "object"}, alias="schema")


class ResponseFormat(Body):
    """The required format of the text."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_where_it_is_named(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError(f"is {self.type!r}; json_schema goes with the type json_schema and with no other")
        return self


class StreamOptions(Body):
    """Additional parts of a stream."""

    include_usage: Flag = False
    include_obfuscation: Flag = False  # no effect: on loopback or over TLS a stream needs none


def _one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class GenerationFields(Body):
    """Fields of every generating route, named as in the protocol, but without its groups."""

    no_input: ClassVar[tuple[str, Any]] = ("prompt", "")  # the input field, and a placeholder for an invalid input

    model: Text | None = None
    temperature: Real | None = None
    top_p: Real | None = None
    top_k: UInt32 | None = None
    min_p: Real | None = None
    repetition_penalty: Real | None = None
    presence_penalty: Real | None = None
    frequency_penalty: Real | None = None
    logit_bias: Annotated[dict[TokenKey, Real], _at_most(MAX_BIASES)] | None = None
    allowed_token_ids: Ids | None = None
    banned_token_ids: Ids | None = None
    seed: UInt64 | None = None
    min_tokens: UInt32 | None = None
    stop: Annotated[Texts, BeforeValidator(_one_or_many)] | None = None
    stop_token_ids: Ids | None = None
    ignore_eos: Flag | None = None
    guided_json: Text | Schema | None = None
    guided_regex: Text | None = None
    guided_grammar: Text | None = None
    guided_choice: Annotated[list[Text], Field(fail_fast=True), _at_most(MAX_CHOICES)] | None = None
    cache_salt: Text | None = None
    speculation: SpeculationFields | None = None
    priority: Int32 | None = None
    stream: Flag = False
    event_ids: Flag = False  # give events of a stream ids; see the header Last-Event-ID
    timeout: Seconds | None = None

    def conflicts(self) -> Iterator[Violation]:
        """Yield a violation for fields that are valid by themselves but exclude each other."""
        structures = ("guided_json", "guided_regex", "guided_grammar", "guided_choice", "response_format")
        given = [name for name in structures if getattr(self, name, None) is not None]
        if len(given) > 1:
            yield Violation("body", f"has {' and '.join(given)}; expected one structure")


def _one_prompt(value: Any) -> Any:
    """Return the only prompt of a list; refuse a list of several prompts."""
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > 1:
            raise ValueError(f"has {len(value)} prompts; send a request for each")
        return value[0]
    return value


class GenerateBody(GenerationFields):
    """Body of `POST /generate`."""

    prompt: Text
    max_new_tokens: UInt32 | None = None
    k_draft: UInt32 | None = None


class OpenAiBody(GenerationFields):
    """Fields of both OpenAI routes."""

    n: UInt32 | None = None
    max_tokens: UInt32 | None = None
    stream_options: StreamOptions = StreamOptions()
    response_format: ResponseFormat | None = None


class CompletionBody(OpenAiBody):
    """Body of `POST /v1/completions`."""

    prompt: Annotated[Text | Ids, BeforeValidator(_one_prompt)]
    logprobs: UInt32 | None = None  # number of likeliest tokens beside each; 0: only the token's own


class TextPart(Body):
    """A part of a message that is text."""

    type: Literal["text"]
    text: Text


class ChatTurn(Body):
    """A message of a conversation."""

    role: Text
    content: Text | Annotated[list[TextPart], Field(fail_fast=True), _at_most(MAX_TEXTS)]

    @property
    def text(self) -> str:
        """The whole text of the message."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatBody(OpenAiBody):
    """Body of `POST /v1/chat/completions`."""

    no_input = ("messages", [])

    messages: Annotated[list[ChatTurn], Field(fail_fast=True), _at_most(MAX_MESSAGES)]
    max_completion_tokens: UInt32 | None = None
    logprobs: Flag | None = None
    top_logprobs: UInt32 | None = None

    def conflicts(self) -> Iterator[Violation]:
        """Yield the violations of all routes, and one if both limits on the output are given and differ."""
        yield from super().conflicts()
        newer, older = self.max_completion_tokens, self.max_tokens
        if newer is not None and older is not None and newer != older:
            yield Violation("body", f"has max_completion_tokens {newer} and max_tokens, its older name, {older}")
