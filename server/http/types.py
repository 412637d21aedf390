"""The bodies of the HTTP routes: names, types and defaults of their fields. `requests.py` interprets their values."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from engine.errors import Violation, shown
from server.admission.conversation import MAX_TOOLS
from server.chat import MAX_MESSAGES
from server.http.fields import (
    MAX_BIASES,
    MAX_CHOICES,
    MAX_PROMPTS,
    MAX_TEXTS,
    Body,
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
    not_served,
)

_GROUP = re.compile(r"^(sampling|stopping|output|messages)\.")  # the protocol's groups are not in HTTP bodies


class SpeculationFields(Body):
    """Speculation options, named as in the protocol."""

    mode: Literal["auto", "off", "fixed"] | None = None
    num_draft_tokens: UInt32 | None = None
    proposer: Text | None = None
    verification: Literal["coupled", "rejection"] | None = None


ANY_OBJECT = {"type": "object"}
Choices = Annotated[list[Text], Field(fail_fast=True), at_most(MAX_CHOICES)]


class JsonSchema(Body):
    """A JSON schema. Its name and description are not used."""

    name: Text | None = None
    description: Text | None = None
    strict: Flag | None = None  # no effect: the schema is always enforced strictly
    schema_: Schema = Field(alias="schema")


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
    continuous_usage_stats: Flag = False  # with include_usage: the usage so far in every chunk
    include_obfuscation: Flag = False  # no effect: on loopback or over TLS a stream needs none


class TextPart(Body):
    """A part of a message that is text."""

    type: Literal["text"]
    text: Text


def _only_text_parts(value: Any) -> Any:
    """Refuse parts that are no text by their type, before their other fields are refused by name."""
    for part in value if isinstance(value, list) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise ValueError(f"has a part of type {shown(kind)}; this server takes text alone")
    return value


TextParts = Annotated[list[TextPart], Field(fail_fast=True), at_most(MAX_TEXTS)]
TextContent = Annotated[Text | TextParts, BeforeValidator(_only_text_parts)]


def text_of(content: str | list[TextPart] | None) -> str:
    """Return the whole text of a content; it is empty if there is none."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text for part in content)


class PredictionBody(Body):
    """An expected output."""

    type: Literal["content"]
    content: TextContent


def _as_prediction(value: Any) -> Any:
    return {"type": "content", "content": value} if isinstance(value, str) else value


class StructuredOutputs(Body):
    """A structure of the text, in one of several notations."""

    json_: Text | Schema | None = Field(None, alias="json")
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
    guided_json: Text | Schema | None = None
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
        wanted = self.structured_outputs or StructuredOutputs.model_construct()
        if wanted.json_object:
            yield Structure("structured_outputs.json_object", "json", ANY_OBJECT)
        for kind in ("json", "regex", "grammar", "choice"):
            named = {f"guided_{kind}": self, f"structured_outputs.{kind}": wanted}
            for field, owner in named.items():
                name = field.removeprefix("structured_outputs.")
                value = getattr(owner, "json_" if name == "json" else name)
                if value is not None:
                    yield Structure(field, kind, value)


class GenerateBody(GenerationFields):
    """Body of `POST /generate`."""

    prompt: Text
    max_new_tokens: UInt32 | None = None
    k_draft: UInt32 | None = None

    def names(self) -> dict[str, str]:
        drafts = {} if self.k_draft is None else {r"speculation\.num_draft_tokens": "k_draft"}
        return super().names() | {"max_tokens": "max_new_tokens"} | drafts


class OpenAiBody(GenerationFields):
    """Fields of both OpenAI routes."""

    n: UInt32 | None = None
    max_tokens: UInt32 | None = None
    stream_options: StreamOptions = StreamOptions()
    response_format: ResponseFormat | None = None
    return_speculation_stats: Flag = False

    @property
    def has_running_usage(self) -> bool:
        """Whether every chunk of a stream tells the usage so far."""
        return self.stream_options.include_usage and self.stream_options.continuous_usage_stats

    def structures(self) -> Iterator[Structure]:
        yield from super().structures()
        wanted = self.response_format
        if wanted is not None and wanted.json_schema is not None:
            yield Structure("response_format.json_schema.schema", "json", wanted.json_schema.schema_)
        elif wanted is not None and wanted.type == "json_object":
            yield Structure("response_format", "json", ANY_OBJECT)

    def conflicts(self) -> Iterator[Violation]:
        yield from super().conflicts()
        if self.event_ids and self.has_running_usage:
            yield Violation("event_ids", "is true; not served with stream_options.continuous_usage_stats")


def _kind_of_prompt(value: Any) -> str:
    return "list[int]" if isinstance(value, list) else "str"


def _kind_of_prompts(value: Any) -> str:
    is_list_of_prompts = isinstance(value, list) and bool(value) and isinstance(value[0], str | list)
    return "list[prompt]" if is_list_of_prompts else _kind_of_prompt(value)


# The tags are names that errors leave out of a field's path, as they do with those of a plain union.
Prompt = Annotated[
    Annotated[Text, Tag("str")] | Annotated[Ids, Tag("list[int]")],
    Discriminator(_kind_of_prompt),
]
Prompts = Annotated[
    Annotated[Text, Tag("str")]
    | Annotated[Ids, Tag("list[int]")]
    | Annotated[list[Prompt], Field(fail_fast=True), at_most(MAX_PROMPTS), Tag("list[prompt]")],
    Discriminator(_kind_of_prompts),
]


def _no_suffix(value: Any) -> None:
    if value != "":
        told = shown(value) if isinstance(value, str) else "no text"
        raise ValueError(f"is {told}; text after the prompt is not served: the model only continues texts at their end")


class CompletionBody(OpenAiBody):
    """Body of `POST /v1/completions`."""

    prompt: Prompts
    logprobs: UInt32 | None = None  # number of likeliest tokens beside each; 0: only the token's own
    echo: Flag = False
    suffix: Annotated[None, BeforeValidator(_no_suffix)] = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, of which most requests have one."""
        is_list = isinstance(self.prompt, list) and bool(self.prompt) and not isinstance(self.prompt[0], int)
        return self.prompt if is_list else [self.prompt]  # type: ignore[return-value,list-item]

    @property
    def is_only_scored(self) -> bool:
        """Whether only the prompt is wanted, and nothing after it."""
        return self.echo and self.max_tokens == 0

    def names(self) -> dict[str, str]:
        return super().names() | {"token_ids": "prompt", "top_logprobs": "logprobs"}

    def conflicts(self) -> Iterator[Violation]:
        yield from super().conflicts()
        if self.event_ids and len(self.prompts) > 1:
            yield Violation("event_ids", f"is true; not served with several prompts, here {len(self.prompts)}")
        if self.event_ids and self.echo:
            yield Violation("event_ids", "is true; not served with echo")


class FunctionBody(Body):
    """A function that the model may call."""

    name: Text
    description: Text = ""
    parameters: Schema | None = None
    strict: Flag = False


class ToolBody(Body):
    """An entry of `tools`."""

    type: Literal["function"]
    function: FunctionBody


Tools = Annotated[list[ToolBody], Field(fail_fast=True), at_most(MAX_TOOLS)]


class FunctionName(Body):
    """The name of a function."""

    name: Text


class ToolChoiceBody(Body):
    """Whether, or which function, the model has to call."""

    type: Literal["none", "auto", "required", "function"]
    function: FunctionName | None = None

    @model_validator(mode="after")
    def _function_where_it_is_named(self) -> ToolChoiceBody:
        if (self.type == "function") != (self.function is not None):
            raise ValueError(f"is of type {self.type!r}; function goes with the type function and with no other")
        return self


def _as_tool_choice(value: Any) -> Any:
    if isinstance(value, dict) and value.get("type") == "allowed_tools":
        raise ValueError("is of type 'allowed_tools', which is not served; send only the allowed tools as tools")
    if isinstance(value, str) and value not in ("none", "auto", "required"):
        raise ValueError(f"is {shown(value)}; expected 'none', 'auto', 'required' or a function")
    return {"type": value} if isinstance(value, str) else value


ToolChoiceField = Annotated[ToolChoiceBody, BeforeValidator(_as_tool_choice)]


class CalledFunction(Body):
    """The function of a call, and the JSON text of its arguments."""

    name: Text
    arguments: Text = ""


class ToolCallBody(Body):
    """A call that the assistant made."""

    id: Text = ""
    type: Literal["function"] = "function"
    index: UInt32 | None = None  # no effect: a client may send a stream's deltas back
    function: CalledFunction


ToolCalls = Annotated[list[ToolCallBody], Field(fail_fast=True), at_most(MAX_TOOLS)]


class ChatTurn(Body):
    """A message of a conversation."""

    role: Text
    content: TextContent | None = None
    name: Text | None = None
    tool_calls: ToolCalls = []  # noqa: RUF012  # pydantic copies it
    tool_call_id: Text | None = None
    reasoning: Text | None = None
    reasoning_content: Text | None = None  # another name of `reasoning`
    function_call: Annotated[None, not_served("use tool_calls")] = None

    @property
    def thoughts(self) -> str | None:
        """The reasoning of the message, by either of its names."""
        return self.reasoning_content if self.reasoning is None else self.reasoning


_CHAT_NAMES = {
    "prompt": "messages",
    r"tools\[(\d+)\](?=\.)": r"tools[\2].function",
    r"tool_choice\.name": "tool_choice.function.name",
    r"tool_choice\.mode": "tool_choice",
    "template_arguments": "chat_template_kwargs",
}


class ChatBody(OpenAiBody):
    """Body of `POST /v1/chat/completions`."""

    no_input = ("messages", [])

    messages: Annotated[list[ChatTurn], Field(fail_fast=True), at_most(MAX_MESSAGES)]
    max_completion_tokens: UInt32 | None = None
    logprobs: Flag | None = None
    top_logprobs: UInt32 | None = None
    tools: Tools = []  # noqa: RUF012  # pydantic copies it
    tool_choice: ToolChoiceField | None = None
    parallel_tool_calls: Flag | None = None
    functions: Annotated[None, not_served("use tools")] = None
    function_call: Annotated[None, not_served("use tool_choice")] = None
    add_generation_prompt: Flag | None = None
    continue_final_message: Flag = False
    chat_template_kwargs: Schema | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    thinking_budget: UInt32 | None = None
    thinking_token_budget: UInt32 | None = None  # another name of `thinking_budget`

    def names(self) -> dict[str, str]:
        newer = {} if self.max_completion_tokens is None else {"max_tokens": "max_completion_tokens"}
        return super().names() | newer | _CHAT_NAMES

    def conflicts(self) -> Iterator[Violation]:
        yield from super().conflicts()
        for i, turn in enumerate(self.messages):
            if turn.content is None and not (turn.role == "assistant" and (turn.tool_calls or turn.thoughts)):
                yield Violation(f"messages[{i}].content", "is missing")
        newer, older = self.max_completion_tokens, self.max_tokens
        if newer is not None and older is not None and newer != older:
            yield Violation("body", f"has max_completion_tokens {newer} and max_tokens, its older name, {older}")
        budget, other = self.thinking_budget, self.thinking_token_budget
        if budget is not None and other is not None and budget != other:
            yield Violation("body", f"has thinking_budget {budget} and thinking_token_budget, its other name, {other}")
