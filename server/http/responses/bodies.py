"""Fields of the body of `/v1/responses`: names, types and defaults, and the request that they make.

Unknown fields are refused by name. Fields without effect on the output are declared, with a comment, because agents
send them with every request.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from pydantic import Field

from engine.errors import InvalidRequest
from engine.types import Request
from server.chat import MAX_MESSAGES, MAX_TOOLS, Conversation
from server.formats.base import ANY_OBJECT, Tool
from server.formats.json_text import object_in
from server.http.agents import SEPARATOR, AgentBody, Turns
from server.http.bodies import FunctionBody, Input, Structure, template_arguments
from server.http.calls import Json
from server.http.fields import (
    MAX_PARTS,
    TEXT_OR_LIST,
    TEXT_OR_OBJECT,
    Body,
    ByType,
    Flag,
    Schema,
    Text,
    UInt32,
    at_most,
    goes_with,
    not_served,
    text_of,
)


class ItemPart(Body):
    """A text in the content of a message, or in the output of a call."""

    ignored = frozenset({"annotations", "logprobs", "prompt_cache_breakpoint"})  # every prompt is cached
    type: Literal["input_text", "output_text", "text"]
    text: Text


PartList = Annotated[list[Annotated[ItemPart, ByType()]], Field(fail_fast=True), at_most(MAX_PARTS)]
Content = Annotated[Text | PartList, TEXT_OR_LIST]


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


class ReasoningPart(Body):
    """A text of reasoning, or of a summary of it."""

    type: Literal["summary_text", "reasoning_text", "text"]
    text: Text


class ReasoningItem(Item):
    """Reasoning of the model."""

    type: Literal["reasoning"]
    summary: Annotated[list[ReasoningPart], at_most(MAX_PARTS)] = []  # noqa: RUF012  # pydantic copies it
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
InputItem = Annotated[Known, ByType(lambda item: "message" if "role" in item else None)]
ItemList = Annotated[list[InputItem], Field(fail_fast=True), at_most(MAX_MESSAGES)]


class FunctionTool(FunctionBody):
    """A function that the model may call."""

    type: Literal["function"]


class GrammarFormat(Body):
    """The format of the input of a custom tool. A grammar is shown to the model, but it is not enforced."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: Text | None = None


class CustomTool(Body):
    """A tool whose input is a text."""

    type: Literal["custom"]
    name: Text
    description: Text = ""
    format: GrammarFormat = GrammarFormat(type="text")

    @property
    def declared(self) -> Tool:
        """The tool as a function with one text as its argument."""
        parts = [self.description] if self.description else []
        if self.format.definition is not None:
            parts.append(f"The input is a text of this {self.format.syntax} grammar:\n{self.format.definition}")
        return Tool(self.name, SEPARATOR.join(parts), json.dumps(_ONE_TEXT))


InnerTool = FunctionTool | CustomTool


class NamespaceTool(Body):
    """Functions whose names are of their own in a namespace."""

    type: Literal["namespace"]
    name: Text
    description: Text = ""
    tools: Annotated[list[Annotated[InnerTool, ByType()]], Field(fail_fast=True), at_most(MAX_TOOLS)]


class SearchTool(Body):
    """A search of the web by the server. It is not supported: the model does not see it.

    Codex offers one in every request. What it may contain is therefore of no interest.
    """

    ignored = frozenset(
        ["external_web_access", "filters", "user_location", "search_context_size", "search_content_types"]
    )
    type: Literal["web_search"]


AnyTool = FunctionTool | CustomTool | NamespaceTool | SearchTool
OfferedTool = Annotated[AnyTool, ByType()]


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
    _schema_where_it_is_named = goes_with("json_schema", "schema_", "schema")


class TextFields(Body):
    """What the text has to be like."""

    format: Annotated[TextFormat, ByType()] | None = None
    verbosity: Text | None = None


class ReasoningFields(Body):
    """How to reason."""

    ignored = frozenset({"context"})  # the template decides which reasoning of earlier turns it has
    effort: Text | None = None
    summary: Text | None = None  # no effect: the reasoning itself is sent
    generate_summary: Text | None = None  # the older name of `summary`


_STORED = not_served("this server stores nothing; send the whole conversation as input")
_NAMES = {"messages|prompt": "input", "max_tokens": "max_output_tokens", r"tool_choice\.mode": "tool_choice"}


class ResponsesBody(AgentBody):
    """Body of `POST /v1/responses`."""

    ignored = frozenset(
        {"max_tool_calls", "prompt_cache_options", "client_metadata", "stream_options"}
    )  # no tools of the server to be limited, and no obfuscation
    input: Annotated[Text | ItemList, TEXT_OR_LIST]
    instructions: Text | None = None
    max_output_tokens: UInt32 | None = None
    tools: Annotated[list[OfferedTool], Field(fail_fast=True), at_most(MAX_TOOLS)] = []  # noqa: RUF012
    tool_choice: Annotated[Literal["none", "auto", "required"] | Annotated[ToolName, ByType()], TEXT_OR_OBJECT] = "auto"
    parallel_tool_calls: Flag = True
    text: TextFields = TextFields()
    reasoning: ReasoningFields = ReasoningFields()
    include: Annotated[list[Literal["reasoning.encrypted_content"]], at_most(MAX_PARTS)] = []  # noqa: RUF012
    truncation: Literal["disabled"] = "disabled"
    previous_response_id: Annotated[None, _STORED] = None
    conversation: Annotated[None, _STORED] = None
    prompt: Annotated[None, _STORED] = None
    background: Annotated[None, not_served("an answer is sent only on the connection that asked for it")] = None
    top_logprobs: Annotated[None, not_served("this route sends no log-probabilities")] = None

    def structures(self) -> Iterator[Structure]:
        yield from super().structures()
        wanted = self.text.format
        if wanted is not None and wanted.schema_ is not None:
            yield Structure("text.format.schema", "json", wanted.schema_)
        elif wanted is not None and wanted.type != "text":
            yield Structure("text.format", "json", ANY_OBJECT)

    def names(self) -> dict[str, str]:
        return super().names() | _NAMES

    def request(self) -> Request:
        return self.limited(self.max_output_tokens)

    @property
    def prompts(self) -> list[Input]:
        turns, choice = Turns(), self.tool_choice
        turns.instruct(self.instructions or "")
        if isinstance(self.input, str):
            turns.ask(self.input)
        else:
            for i, item in enumerate(self.input):
                _add(turns, item, f"input[{i}]")
        return [
            Conversation(
                messages=turns.messages(),
                tools=tuple(offered.declared for offered in functions(self).values()),
                tool_choice=choice if isinstance(choice, str) else "auto",
                tool_name=None if isinstance(choice, str) else flat_name(choice.name, choice.namespace),
                parallel_tool_calls=self.parallel_tool_calls,
                template_arguments=template_arguments(self.reasoning.effort, self.text.verbosity),
            )
        ]

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
    declared: Tool


def functions(body: ResponsesBody) -> dict[str, OfferedFunction]:
    """Return the functions that the model sees, by their names in the prompt."""
    found: dict[str, OfferedFunction] = {}
    for offered in body.tools:
        namespace = offered.name if isinstance(offered, NamespaceTool) else None
        for tool in offered.tools if isinstance(offered, NamespaceTool) else [offered]:
            if isinstance(tool, SearchTool):
                continue
            declared = replace(tool.declared, name=flat_name(tool.name, namespace))
            if declared.name in found:
                raise InvalidRequest.of("tools", f"has {declared.name!r} twice")
            is_custom = isinstance(tool, CustomTool)
            found[declared.name] = OfferedFunction(tool.name, namespace, is_custom, declared)
    return found


def flat_name(name: str, namespace: str | None) -> str:
    """Return the name of a function in the prompt."""
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
            turns.answer(text_of(item.content, SEPARATOR))
        case MessageItem(role="user"):
            turns.ask(text_of(item.content, SEPARATOR))
        case MessageItem():
            turns.instruct(text_of(item.content, SEPARATOR))
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
            turns.result(f"{field}.call_id", item.call_id, text_of(item.output, SEPARATOR))


def _reasoning(item: ReasoningItem) -> str:
    parts = item.content or item.summary
    return text_of(parts, SEPARATOR) if parts else _unsealed(item.encrypted_content or "")
