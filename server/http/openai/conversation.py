"""Conversations of bodies as messages of the protocol, and their tools as the parsers of answers take them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from pilotfish.v1 import generation_pb2 as pb
from server.formats.base import Tool
from server.http.types import ChatBody, ChatTurn, FunctionBody, ToolBody, ToolChoiceBody, text_of

_ROLES = {"developer": "system", "function": "tool"}  # newer and older names, which few templates know
_MODES = {
    "none": pb.TOOL_CHOICE_MODE_NONE,
    "auto": pb.TOOL_CHOICE_MODE_AUTO,
    "required": pb.TOOL_CHOICE_MODE_REQUIRED,
}


def conversation(body: ChatBody) -> pb.ChatMessages:
    """Convert the messages, the tools, and all that the template and the structure of the answer depend on."""
    arguments = template_arguments(body)
    budget = body.thinking_token_budget if body.thinking_budget is None else body.thinking_budget
    return pb.ChatMessages(
        messages=map(_turn, body.messages),
        tools=tools_of(body.tools),
        tool_choice=None if body.tool_choice is None else tool_choice_of(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        template_arguments=json.dumps(arguments) if arguments else None,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        thinking_budget=budget,
    )


def template_arguments(body: ChatBody) -> dict[str, Any]:
    """Return more variables of the template. Those that the caller names go before those that fields imply."""
    implied: dict[str, Any] = {}
    if body.reasoning_effort is not None:
        implied["reasoning_effort"] = body.reasoning_effort
    if body.reasoning_effort == "none":  # most templates have a switch, and no degrees
        implied["enable_thinking"] = False
    if body.verbosity is not None:
        implied["verbosity"] = body.verbosity
    return implied | (body.chat_template_kwargs or {})


def tools_of(tools: Iterable[ToolBody]) -> list[pb.Tool]:
    """Convert the functions that the model may call."""
    return [
        pb.Tool(
            name=tool.function.name,
            description=tool.function.description,
            parameters=_parameters(tool.function) or "",
            strict=tool.function.strict,
        )
        for tool in tools
    ]


def tool_choice_of(choice: ToolChoiceBody) -> pb.ToolChoice:
    """Convert the choice of a call."""
    if choice.function is not None:
        return pb.ToolChoice(name=choice.function.name)
    return pb.ToolChoice(mode=_MODES[choice.type])


def callable_tools(tools: Sequence[ToolBody], choice: ToolChoiceBody | None) -> list[Tool]:
    """Return the functions that the answer may call, for its parser."""
    if choice is not None and choice.type == "none":
        return []
    name = None if choice is None or choice.function is None else choice.function.name
    return [_tool(tool.function) for tool in tools if name in (None, tool.function.name)]


def _tool(function: FunctionBody) -> Tool:
    parameters = _parameters(function)
    if parameters is None:
        return Tool(function.name, function.description, strict=function.strict)
    return Tool(function.name, function.description, parameters, function.strict)


def _parameters(function: FunctionBody) -> str | None:
    return None if function.parameters is None else json.dumps(function.parameters)


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
