"""Conversations of bodies, with their tools, as messages of the protocol."""

from __future__ import annotations

import json
from typing import Any

from pilotfish.v1 import generation_pb2 as pb
from server.http.types import ChatBody, ChatTurn, FunctionBody, ToolChoiceBody, text_of

_ROLES = {"developer": "system", "function": "tool"}  # newer and older names, which few templates know


def conversation(body: ChatBody) -> pb.ChatMessages:
    """Convert the messages, the tools, and all that the template and the structure of the answer depend on."""
    arguments = _template_arguments(body)
    return pb.ChatMessages(
        messages=map(_turn, body.messages),
        tools=[_tool(tool.function) for tool in body.tools],
        tool_choice=None if body.tool_choice is None else _tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        template_arguments=json.dumps(arguments) if arguments else None,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        thinking_budget=body.thinking_token_budget if body.thinking_budget is None else body.thinking_budget,
    )


def _template_arguments(body: ChatBody) -> dict[str, Any]:
    """Return more variables of the template. Those that the caller names go before those that fields imply."""
    implied = {} if body.reasoning_effort is None else effort_arguments(body.reasoning_effort)
    if body.verbosity is not None:
        implied["verbosity"] = body.verbosity
    return implied | (body.chat_template_kwargs or {})


def effort_arguments(effort: str) -> dict[str, Any]:
    """Return the variables that ask for an effort of reasoning. Most templates have a switch, and no degrees."""
    return {"reasoning_effort": effort} | ({"enable_thinking": False} if effort == "none" else {})


def _tool(function: FunctionBody) -> pb.Tool:
    schema = "" if function.parameters is None else json.dumps(function.parameters)
    return pb.Tool(name=function.name, description=function.description, parameters=schema, strict=function.strict)


def _tool_choice(choice: ToolChoiceBody) -> pb.ToolChoice:
    if choice.function is not None:
        return pb.ToolChoice(name=choice.function.name)
    return pb.ToolChoice(mode=pb.ToolChoiceMode.Value(f"TOOL_CHOICE_MODE_{choice.type.upper()}"))


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
