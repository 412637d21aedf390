"""Conversion of bodies of `/v1/responses` to messages of the protocol. Knows no engine."""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass

from engine.errors import InvalidRequest
from pilotfish.v1 import generation_pb2 as pb
from server.formats.json_text import object_in
from server.http.agents import SEPARATOR, Json, Turns, without_conversation
from server.http.requests import effort_arguments, messages_of
from server.http.responses.types import (
    CallOutputItem,
    Content,
    CustomCallItem,
    CustomTool,
    FunctionCallItem,
    FunctionTool,
    MessageItem,
    NamespaceTool,
    ReasoningItem,
    ResponsesBody,
    ToolName,
)

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
    arguments: Json = {} if body.reasoning.effort is None else effort_arguments(body.reasoning.effort)
    if body.text.verbosity is not None:
        arguments["verbosity"] = body.text.verbosity
    if arguments:
        asked.template_arguments = json.dumps(arguments)
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


Known = MessageItem | ReasoningItem | FunctionCallItem | CustomCallItem | CallOutputItem


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
