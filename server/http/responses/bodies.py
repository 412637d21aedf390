"""Fields of the body of `/v1/responses`: names, types and defaults, and their conversion to messages of the protocol.

Unknown fields are refused by name. Fields that have no effect on the output are declared with a comment that says so,
because agents send them with every request.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from engine.errors import InvalidRequest
from pilotfish.v1 import generation_pb2 as pb
from server.admission.conversation import MAX_TOOLS
from server.chat import MAX_MESSAGES
from server.formats.json_text import object_in
from server.http.agents import SEPARATOR, AgentBody, Json, Turns, without_conversation
from server.http.fields import (
    MAX_PARTS,
    PARTS,
    TEXT,
    TEXT_OR_PARTS,
    Body,
    Flag,
    Schema,
    Text,
    UInt32,
    at_most,
    not_served,
    of_types,
)
from server.http.requests import messages_of, template_arguments
from server.http.types import ANY_OBJECT, FunctionBody, Structure


class ItemPart(Body):
    """A text in the content of a message, or in the output of a call."""

    ignored = frozenset({"annotations", "logprobs", "prompt_cache_breakpoint"})  # every prompt is cached
    type: Literal["input_text", "output_text", "text"]
    text: Text


PartList = Annotated[list[Annotated[ItemPart, of_types(ItemPart)]], Field(fail_fast=True), at_most(MAX_PARTS)]
Content = Annotated[Annotated[Text, TEXT] | Annotated[PartList, PARTS], TEXT_OR_PARTS]


class Item(Body):
    """Base of the items of a conversation."""

    # Nothing is stored, so nothing can be referred to.
    ignored = frozenset({"id", "status", "internal_chat_message_metadata_passthrough"})


class MessageItem(Item):
    """A message."""

    ignored = Item.ignored | frozenset({"phase"})
    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class SummaryPart(Body):
    """A summary of reasoning."""

    type: Literal["summary_text"]
    text: Text


class ReasoningPart(Body):
    """A text of reasoning."""

    type: Literal["reasoning_text", "text"]
    text: Text


class ReasoningItem(Item):
    """Reasoning of the model."""

    type: Literal["reasoning"]
    summary: Annotated[list[SummaryPart], at_most(MAX_PARTS)] = []  # noqa: RUF012  # pydantic copies it
    content: Annotated[list[ReasoningPart], at_most(MAX_PARTS)] = []  # noqa: RUF012
    encrypted_content: Text | None = None


class NamedCall(Item):
    """Base of calls."""

    ignored = Item.ignored | frozenset({"caller"})
    call_id: Text
    name: Text
    namespace: Text | None = None


class FunctionCallItem(NamedCall):
    """A call of a function."""

    type: Literal["function_call"]
    arguments: Text


class CustomCallItem(NamedCall):
    """A call of a custom tool."""

    type: Literal["custom_tool_call"]
    input: Text


class CallOutputItem(Item):
    """The result of a call."""

    ignored = Item.ignored | frozenset({"name", "caller"})  # the call has the name
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Text
    output: Content


Known = MessageItem | ReasoningItem | FunctionCallItem | CustomCallItem | CallOutputItem
InputItem = Annotated[
    Annotated[Known, Field(discriminator="type")], of_types(Known, lambda item: "message" if "role" in item else None)
]
ItemList = Annotated[list[InputItem], Field(fail_fast=True), at_most(MAX_MESSAGES)]


class FunctionTool(FunctionBody):
    """A function that the model may call."""

    type: Literal["function"]


class GrammarFormat(Body):
    """The format of the input of a custom tool. The model is told of a grammar, but it is not enforced."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: Text | None = None


class CustomTool(Body):
    """A tool whose input is a text."""

    type: Literal["custom"]
    name: Text
    description: Text = ""
    format: GrammarFormat = GrammarFormat(type="text")


InnerTool = FunctionTool | CustomTool


class NamespaceTool(Body):
    """Functions whose names are of their own in a namespace."""

    type: Literal["namespace"]
    name: Text
    description: Text = ""
    tools: Annotated[
        list[Annotated[Annotated[InnerTool, Field(discriminator="type")], of_types(InnerTool)]],
        Field(fail_fast=True),
        at_most(MAX_TOOLS),
    ]


class SearchTool(Body):
    """A search of the web by the server. There is none here: the model is not told of it.

    Codex offers one in every request. What it may contain is therefore of no interest.
    """

    ignored = frozenset(
        ["external_web_access", "filters", "user_location", "search_context_size", "search_content_types"]
    )
    type: Literal["web_search"]


AnyTool = FunctionTool | CustomTool | NamespaceTool | SearchTool
OfferedTool = Annotated[Annotated[AnyTool, Field(discriminator="type")], of_types(AnyTool)]


class ToolName(Body):
    """The tool that has to be called."""

    type: Literal["function", "custom"]
    name: Text
    namespace: Text | None = None


class TextFormat(Body):
    """The required format of the text."""

    type: Literal["text", "json_object", "json_schema"]
    name: Text | None = None  # no effect
    description: Text | None = None  # no effect
    strict: Flag | None = None  # no effect: the schema is always enforced strictly
    schema_: Schema | None = Field(default=None, alias="schema")

    @model_validator(mode="after")
    def _schema_where_it_is_named(self) -> TextFormat:
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise ValueError(f"is {self.type!r}; a schema goes with the type json_schema and with no other")
        return self


class TextFields(Body):
    """What the text has to be like."""

    format: Annotated[TextFormat, of_types(TextFormat)] | None = None
    verbosity: Text | None = None


class ReasoningFields(Body):
    """How to reason."""

    ignored = frozenset({"context"})  # the template decides which reasoning of earlier turns it has
    effort: Text | None = None
    summary: Text | None = None  # no effect: the reasoning itself is sent
    generate_summary: Text | None = None  # the older name of `summary`


_STORED = not_served("this server stores nothing, so send the whole conversation as input")


def _no_top_logprobs(value: object) -> None:
    if value != 0:
        raise ValueError("is not 0; this route sends no log-probabilities")


def _not_in_background(value: object) -> None:
    if value is not False:
        raise ValueError("is not false; an answer is sent to its caller alone, while it is made")


_NAMES = {"messages|prompt": "input", "max_tokens": "max_output_tokens", r"tool_choice\.mode": "tool_choice"}


class ResponsesBody(AgentBody):
    """Body of `POST /v1/responses`."""

    ignored = frozenset(
        {"max_tool_calls", "prompt_cache_options", "client_metadata", "stream_options"}
    )  # no tools of the server to be limited, and no obfuscation
    input: Annotated[Annotated[Text, TEXT] | Annotated[ItemList, PARTS], TEXT_OR_PARTS]
    instructions: Text | None = None
    max_output_tokens: UInt32 | None = None
    tools: Annotated[list[OfferedTool], Field(fail_fast=True), at_most(MAX_TOOLS)] = []  # noqa: RUF012
    tool_choice: Literal["none", "auto", "required"] | Annotated[ToolName, of_types(ToolName)] = "auto"
    parallel_tool_calls: Flag = True
    text: TextFields = TextFields()
    reasoning: ReasoningFields = ReasoningFields()
    include: Annotated[list[Literal["reasoning.encrypted_content"]], at_most(MAX_PARTS)] = []  # noqa: RUF012
    truncation: Literal["disabled"] = "disabled"
    previous_response_id: Annotated[None, _STORED] = None
    conversation: Annotated[None, _STORED] = None
    prompt: Annotated[None, _STORED] = None
    background: Annotated[None, BeforeValidator(_not_in_background)] = None
    top_logprobs: Annotated[None, BeforeValidator(_no_top_logprobs)] = None

    def structures(self) -> Iterator[Structure]:
        yield from super().structures()
        wanted = self.text.format
        if wanted is not None and wanted.schema_ is not None:
            yield Structure("text.format.schema", "json", wanted.schema_)
        elif wanted is not None and wanted.type != "text":
            yield Structure("text.format", "json", ANY_OBJECT)

    def names(self) -> dict[str, str]:
        return super().names() | _NAMES

    def echo(self) -> Json:
        """Return the fields that an answer repeats. Long ones are left out: instructions and tools."""
        wanted = self.text.format
        shape = {"type": "text"} if wanted is None else wanted.model_dump(by_alias=True, exclude_none=True)
        choice = self.tool_choice if isinstance(self.tool_choice, str) else self.tool_choice.model_dump()
        return {
            "background": False,
            "instructions": None,
            "max_output_tokens": self.max_output_tokens,
            "metadata": {},
            "parallel_tool_calls": self.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": self.reasoning.effort, "summary": None},
            "store": False,
            "temperature": self.temperature,
            "text": {"format": shape},
            "tool_choice": choice,
            "tools": [],
            "top_p": self.top_p,
            "truncation": self.truncation,
            "user": None,
        }


_SEALED = "pilotfish:"  # before reasoning in `encrypted_content`; a content without it is of another server
_CUSTOM_INPUT = "input"  # the only argument of a custom tool
_ONE_TEXT = {
    "type": "object",
    "properties": {_CUSTOM_INPUT: {"type": "string"}},
    "required": [_CUSTOM_INPUT],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class OfferedFunction:
    """A tool as the caller names it. A custom tool is to the model a function with one text as its argument."""

    name: str
    namespace: str | None
    is_custom: bool
    declared: pb.Tool


@messages_of.register
def _(body: ResponsesBody) -> list[pb.GenerateRequest]:
    """Convert a body of `POST /v1/responses`."""
    request = without_conversation(body, body.max_output_tokens)
    asked = request.messages
    turns = Turns()
    turns.instruct(body.instructions or "")
    if isinstance(body.input, str):
        turns.ask(body.input)
    else:
        for i, item in enumerate(body.input):
            _add(turns, item, f"input[{i}]")
    asked.messages.extend(turns.messages())
    asked.tools.extend(offered.declared for offered in functions(body).values())
    asked.parallel_tool_calls = body.parallel_tool_calls
    match body.tool_choice:
        case ToolName(name=name, namespace=namespace):
            asked.tool_choice.name = flat_name(name, namespace)
        case str(mode):
            asked.tool_choice.mode = pb.ToolChoiceMode.Value(f"TOOL_CHOICE_MODE_{mode.upper()}")
    arguments = template_arguments(body.reasoning.effort, body.text.verbosity)
    if arguments is not None:
        asked.template_arguments = arguments
    return [request]


def functions(body: ResponsesBody) -> dict[str, OfferedFunction]:
    """Return the functions that the model is told of, by the names that it is told."""
    found: dict[str, OfferedFunction] = {}
    for tool in body.tools:
        if isinstance(tool, NamespaceTool):
            for inner in tool.tools:
                _offer(found, inner, tool.name)
        elif isinstance(tool, FunctionTool | CustomTool):
            _offer(found, tool, None)
    return found


def _offer(found: dict[str, OfferedFunction], tool: FunctionTool | CustomTool, namespace: str | None) -> None:
    name = flat_name(tool.name, namespace)
    if name in found:
        raise InvalidRequest.of("tools", f"has {name!r} twice")
    declared = pb.Tool(name=name, description=tool.description)
    if isinstance(tool, FunctionTool):
        declared.parameters = "" if tool.parameters is None else json.dumps(tool.parameters)
        declared.strict = tool.strict
    else:
        declared.parameters = json.dumps(_ONE_TEXT)
        if tool.format.definition is not None:
            grammar = f"The input is a text of this {tool.format.syntax} grammar:\n{tool.format.definition}"
            declared.description = SEPARATOR.join(filter(None, (tool.description, grammar)))
    found[name] = OfferedFunction(tool.name, namespace, isinstance(tool, CustomTool), declared)


def flat_name(name: str, namespace: str | None) -> str:
    """Return the name that the model is told."""
    return name if namespace is None else f"{namespace}.{name}"


def custom_input(arguments: str) -> str:
    """Return the text of a custom tool's call; where the arguments were cut short, the arguments as they are."""
    text = (object_in(arguments) or {}).get(_CUSTOM_INPUT)
    return text if isinstance(text, str) else arguments


def sealed(reasoning: str) -> str:
    """Return reasoning as a caller keeps it that does not show it, and sends it back with the conversation."""
    return _SEALED + base64.b64encode(reasoning.encode()).decode()


def _unsealed(content: str) -> str:
    """Return the reasoning; nothing if another server has sealed it."""
    if not content.startswith(_SEALED):
        return ""
    try:
        return base64.b64decode(content.removeprefix(_SEALED), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""


def _add(turns: Turns, item: Known, field: str) -> None:
    match item:
        case MessageItem(role="assistant"):
            turns.answer(_text(item.content))
        case MessageItem(role="user"):
            turns.ask(_text(item.content))
        case MessageItem():
            turns.instruct(_text(item.content))
        case ReasoningItem():
            text = _reasoning(item)
            if text:
                turns.reason(text)
        case FunctionCallItem():
            turns.call(item.call_id, flat_name(item.name, item.namespace), item.arguments)
        case CustomCallItem():
            arguments: Json = {_CUSTOM_INPUT: item.input}
            turns.call(item.call_id, flat_name(item.name, item.namespace), json.dumps(arguments, ensure_ascii=False))
        case CallOutputItem():
            turns.result(f"{field}.call_id", item.call_id, _text(item.output))


def _text(content: Content) -> str:
    return content if isinstance(content, str) else SEPARATOR.join(part.text for part in content)


def _reasoning(item: ReasoningItem) -> str:
    parts = item.content or item.summary
    return SEPARATOR.join(part.text for part in parts) if parts else _unsealed(item.encrypted_content or "")
