"""OpenAI's Responses API: the body, its request, and answers as lists of items.

Unknown fields are refused by name. Fields without effect are declared, with a comment, because agents send them with
every request.
"""

from __future__ import annotations

import base64
import binascii
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from pilotfish.engine.errors import InvalidRequest
from pilotfish.engine.params import Guided
from pilotfish.engine.types import FinishedOutput, FinishReason, Request
from pilotfish.server.chat import MAX_MESSAGES, MAX_TOOLS, Conversation
from pilotfish.server.formats.base import ANY_OBJECT, Tool
from pilotfish.server.formats.json_text import object_in
from pilotfish.server.http.agents import SEPARATOR, AgentAnswer, AgentBody, AnswerPart, Turns
from pilotfish.server.http.bodies import FunctionBody, Input, ParsedBody, template_arguments
from pilotfish.server.http.calls import Events, Json
from pilotfish.server.http.errors import HttpError
from pilotfish.server.http.fields import (
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
from pilotfish.server.model import ServedModel
from pilotfish.server.streams.stream import OutputStream


class ItemPart(Body):
    """A text in a message's content or in a call's output."""

    ignored = frozenset({"annotations", "logprobs", "prompt_cache_breakpoint"})  # every prompt is cached
    type: Literal["input_text", "output_text", "text"]
    text: Text


PartList = Annotated[list[Annotated[ItemPart, ByType()]], Field(fail_fast=True), at_most(MAX_PARTS)]
Content = Annotated[Text | PartList, TEXT_OR_LIST]


class Item(Body):
    """Base of the items of a conversation."""

    # Nothing is stored, so items cannot be referenced.
    ignored = frozenset({"id", "status", "internal_chat_message_metadata_passthrough"})


class MessageItem(Item):
    """A message."""

    ignored = Item.ignored | frozenset({"phase"})
    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class ReasoningPart(Body):
    """Text of reasoning or of its summary."""

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
    """The format of a custom tool's input. A grammar is shown to the model, but not enforced."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: Text | None = None


class CustomTool(Body):
    """A tool with a text as input."""

    type: Literal["custom"]
    name: Text
    description: Text = ""
    format: GrammarFormat = GrammarFormat(type="text")

    @property
    def declared(self) -> Tool:
        """The tool as a function with one text argument."""
        parts = [self.description] if self.description else []
        if self.format.definition is not None:
            parts.append(f"The input is a text of this {self.format.syntax} grammar:\n{self.format.definition}")
        return Tool(self.name, SEPARATOR.join(parts), json.dumps(_ONE_TEXT))


InnerTool = FunctionTool | CustomTool


class NamespaceTool(Body):
    """Functions in a namespace."""

    type: Literal["namespace"]
    name: Text
    description: Text = ""
    tools: Annotated[list[Annotated[InnerTool, ByType()]], Field(fail_fast=True), at_most(MAX_TOOLS)]


class SearchTool(Body):
    """Web search by the server. Not supported: it is not in the prompt.

    Codex sends one in every request, so any content is accepted.
    """

    ignored = frozenset(
        ["external_web_access", "filters", "user_location", "search_context_size", "search_content_types"]
    )
    type: Literal["web_search"]


AnyTool = FunctionTool | CustomTool | NamespaceTool | SearchTool
OfferedTool = Annotated[AnyTool, ByType()]


class ToolName(Body):
    """The tool that must be called."""

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
    """Options of the text."""

    format: Annotated[TextFormat, ByType()] | None = None
    verbosity: Text | None = None


class ReasoningFields(Body):
    """How to reason."""

    ignored = frozenset({"context"})  # the template decides which earlier reasoning is in the prompt
    effort: Text | None = None
    summary: Text | None = None  # no effect: the reasoning itself is sent
    generate_summary: Text | None = None  # the older name of `summary`


_STORED = not_served("this server stores nothing; send the whole conversation as input")


class ResponsesBody(AgentBody):
    """Body of `POST /v1/responses`."""

    names: ClassVar = {
        "messages|prompt": "input",
        "max_tokens": "max_output_tokens",
        r"tool_choice\.mode": "tool_choice",
    }
    ignored = frozenset(
        {"max_tool_calls", "prompt_cache_options", "client_metadata", "stream_options"}
    )  # there are no server tools to limit, and no obfuscation
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
    background: Annotated[None, not_served("responses are sent only on the connection of their request")] = None
    top_logprobs: Annotated[None, not_served("this route sends no log-probabilities")] = None

    def structures(self) -> Iterator[tuple[str, Guided]]:
        yield from super().structures()
        wanted = self.text.format
        if wanted is not None and wanted.schema_ is not None:
            yield "text.format.schema", Guided(json_schema=json.dumps(wanted.schema_))
        elif wanted is not None and wanted.type != "text":
            yield "text.format", Guided(json_schema=ANY_OBJECT)

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
        """Return the fields that an answer repeats, without the long ones (instructions and tools)."""
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


_SEALED = "pilotfish:"  # prefix of reasoning in `encrypted_content`; without it the content is from another server
_CUSTOM_INPUT = "input"  # the only argument of a custom tool
_ONE_TEXT = {
    "type": "object",
    "properties": {_CUSTOM_INPUT: {"type": "string"}},
    "required": [_CUSTOM_INPUT],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class OfferedFunction:
    """A tool under the caller's name. For the model a custom tool is a function with one text argument."""

    name: str
    namespace: str | None
    is_custom: bool
    declared: Tool


def functions(body: ResponsesBody) -> dict[str, OfferedFunction]:
    """Return the functions of the prompt by their names in it."""
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
    """Return the input of a custom tool's call; if the arguments are incomplete, the raw arguments."""
    text = (object_in(arguments) or {}).get(_CUSTOM_INPUT)
    return text if isinstance(text, str) else arguments


def sealed(reasoning: str) -> str:
    """Return reasoning encoded as `encrypted_content`, which callers send back without showing it."""
    return _SEALED + base64.b64encode(reasoning.encode()).decode()


def _unsealed(content: str) -> str:
    """Return the decoded reasoning; nothing if it is from another server."""
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


_ERROR_CODES = {429: "rate_limit_exceeded"}  # by status; all others: "server_error"
_EVENTS = {"text": "response.output_text", "reasoning": "response.reasoning_text"}
_LOGPROBS: dict[str, Json] = {"text": {"logprobs": []}, "reasoning": {}}


class ResponsesAnswer(AgentAnswer):
    """An answer of `/v1/responses`."""

    def __init__(self, read: ParsedBody[Any], streams: Sequence[OutputStream], model: ServedModel) -> None:
        super().__init__(read, streams, model)
        body: ResponsesBody = read.body
        self._functions = functions(body)  # by their names in the prompt
        self._is_sealed = "reasoning.encrypted_content" in body.include
        self._fields: Json = {
            "id": f"resp_{self._request_id}",
            "object": "response",
            "created_at": int(time.time()),
            "model": self._model,
            "error": None,
            "incomplete_details": None,
            **body.echo(),
            "status": "in_progress",
            "usage": None,
        }
        self._num_events = 0

    async def events(self, events: Events) -> AsyncIterator[list[Json]]:
        async for made in super().events(events):
            yield self._numbered(made)

    def _begin(self) -> list[Json]:
        return [self._event("response.created"), self._event("response.in_progress")]

    def _opened(self, part: AnswerPart) -> list[Json]:
        added = {"type": "response.output_item.added", "output_index": part.index, "item": self._item(part)}
        if part.kind == "call":
            return [added]
        opening = {"type": "response.content_part.added", "content_index": 0, "part": _content(part)}
        return [added, *self._placed(part, opening)]

    def _grown(self, part: AnswerPart, text: str) -> list[Json]:
        if part.kind != "call":
            delta = {"type": f"{_EVENTS[part.kind]}.delta", "content_index": 0, "delta": text, **_LOGPROBS[part.kind]}
            return self._placed(part, delta)
        if self._functions[part.name].is_custom:  # the text is known when its JSON is complete
            return []
        return self._placed(part, {"type": "response.function_call_arguments.delta", "delta": text})

    def _closed(self, part: AnswerPart) -> list[Json]:
        """End an item. A call is complete if its arguments are, even if the answer is not."""
        text = part.text
        if part.kind == "call" and object_in(text) is not None:
            part.status = "completed"
        if part.kind != "call":
            name, more = _EVENTS[part.kind], _LOGPROBS[part.kind]
            closing = [
                {"type": f"{name}.done", "content_index": 0, "text": text, **more},
                {"type": "response.content_part.done", "content_index": 0, "part": _content(part)},
            ]
        elif self._functions[part.name].is_custom:
            closing = [
                {"type": "response.custom_tool_call_input.delta", "delta": custom_input(text)},
                {"type": "response.custom_tool_call_input.done", "input": custom_input(text)},
            ]
        else:
            name = self._functions[part.name].name
            closing = [{"type": "response.function_call_arguments.done", "name": name, "arguments": text}]
        done = {"type": "response.output_item.done", "output_index": part.index, "item": self._item(part)}
        return [*self._placed(part, *closing), done]

    def _end(self, finished: FinishedOutput, reasoning_tokens: int) -> list[Json]:
        is_cut = finished.reason is FinishReason.LENGTH
        status = "incomplete" if is_cut else "completed"
        events = self._close(status)
        if is_cut:
            self._fields["incomplete_details"] = {"reason": "max_output_tokens"}
        self._fields |= {"status": status, "usage": _usage(finished, reasoning_tokens)}
        return [*events, self._event(f"response.{status}")]

    def failure(self, error: HttpError) -> list[Json]:
        code = _ERROR_CODES.get(error.status, "server_error")
        self._fields |= {"status": "failed", "error": {"code": code, "message": error.message}}
        return self._numbered([*self._close("incomplete"), self._event("response.failed")])

    def _whole(self) -> Json:
        return self._fields | {"output": [*map(self._item, self._parts)]}

    def _event(self, name: str) -> Json:
        return {"type": name, "response": self._whole()}

    def _numbered(self, events: list[Json]) -> list[Json]:
        for event in events:
            event["sequence_number"] = self._num_events
            self._num_events += 1
        return events

    def _placed(self, part: AnswerPart, *events: Json) -> list[Json]:
        return [event | {"item_id": self._id(part), "output_index": part.index} for event in events]

    def _id(self, part: AnswerPart) -> str:
        prefix = {"text": "msg", "reasoning": "rs"}.get(part.kind)
        if prefix is None:
            prefix = "ctc" if self._functions[part.name].is_custom else "fc"
        return f"{prefix}_{self._request_id}_{part.index}"

    def _item(self, part: AnswerPart) -> Json:
        """Return the current state of an item, with encrypted reasoning if requested."""
        item: Callable[..., Json] = partial(dict, id=self._id(part), status=part.status)
        content = [] if part.is_open else [_content(part)]
        if part.kind == "text":
            return item(type="message", role="assistant", content=content)
        if part.kind == "reasoning":
            hidden = sealed(part.text) if self._is_sealed and not part.is_open else None
            return item(type="reasoning", summary=[], content=content, encrypted_content=hidden)
        function = self._functions[part.name]
        named = {"call_id": part.call_id, "name": function.name}
        if function.namespace is not None:
            named["namespace"] = function.namespace
        if function.is_custom:
            return item(type="custom_tool_call", **named, input=custom_input(part.text) if part.texts else "")
        return item(type="function_call", **named, arguments=part.text)


def _content(part: AnswerPart) -> Json:
    if part.kind == "reasoning":
        return {"type": "reasoning_text", "text": part.text}
    return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": []}


def _usage(end: FinishedOutput, reasoning_tokens: int) -> Json:
    return {
        "input_tokens": end.prompt_tokens,
        "input_tokens_details": {"cached_tokens": end.cached_prompt_tokens},
        "output_tokens": end.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": end.prompt_tokens + end.completion_tokens,
    }
