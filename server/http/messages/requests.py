"""Conversion of bodies of `/v1/messages` to messages of the protocol. Knows no engine."""

from __future__ import annotations

import json

from engine.errors import InvalidRequest
from pilotfish.v1 import generation_pb2 as pb
from server.http.agents import SEPARATOR, Json, Turns, without_conversation
from server.http.messages.types import (
    ConversationBody,
    MessagesBody,
    MessageTurn,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from server.http.requests import effort_arguments, messages_of

_MODES = {
    "auto": pb.TOOL_CHOICE_MODE_AUTO,
    "any": pb.TOOL_CHOICE_MODE_REQUIRED,
    "none": pb.TOOL_CHOICE_MODE_NONE,
}


@messages_of.register
def _(body: MessagesBody) -> list[pb.GenerateRequest]:
    """Convert a body of `POST /v1/messages`. Of a model that marks no reasoning the budget is dropped later."""
    request = without_conversation(body, body.max_tokens)
    request.stopping.stop.extend(body.stop_sequences)
    request.messages.CopyFrom(conversation(body))
    thinking = body.thinking
    if thinking is not None and thinking.budget_tokens is not None and thinking.type == "enabled":
        request.messages.thinking_budget = thinking.budget_tokens
    return [request]


def conversation(body: ConversationBody) -> pb.ChatMessages:
    """Convert the conversation, and all else that the chat template is given."""
    asked = pb.ChatMessages(messages=_turns(body))
    for tool in body.tools:
        schema = json.dumps(tool.input_schema)
        asked.tools.add(name=tool.name, description=tool.description, parameters=schema, strict=tool.strict)
    choice = body.tool_choice
    if choice.name is not None:
        asked.tool_choice.name = choice.name
    else:
        asked.tool_choice.mode = _MODES[choice.type]
    asked.parallel_tool_calls = not choice.disable_parallel_tool_use
    if asked.messages[-1].role == "assistant":
        asked.continue_final_message = True
    arguments = _arguments(body)
    if arguments:
        asked.template_arguments = json.dumps(arguments)
    return asked


def _arguments(body: ConversationBody) -> Json:
    """Return variables of the chat template. What a caller leaves to the model is left to the template."""
    effort = body.output_config.effort
    arguments = {} if effort is None else effort_arguments(effort)
    if body.thinking is not None and body.thinking.type != "adaptive":
        arguments["enable_thinking"] = body.thinking.type == "enabled"
    return arguments


def _turns(body: ConversationBody) -> list[pb.ChatMessage]:
    if not body.messages:
        raise InvalidRequest.of("messages", "is []; expected at least one message")
    turns = Turns()
    texts = [body.system] if isinstance(body.system, str) else [block.text for block in body.system]
    for text in texts:
        turns.instruct(text)
    for i, turn in enumerate(body.messages):
        _add(turns, turn, f"messages[{i}].content")
    return turns.messages()


def _add(turns: Turns, turn: MessageTurn, field: str) -> None:
    say = {"user": turns.ask, "system": turns.instruct, "assistant": turns.answer}[turn.role]
    if isinstance(turn.content, str):
        say(turn.content)
        return
    for i, block in enumerate(turn.content):
        match block:
            case TextBlock():
                say(block.text)
            case ToolUseBlock():
                turns.call(block.id, block.name, json.dumps(block.input, ensure_ascii=False))
            case ToolResultBlock():
                turns.result(f"{field}[{i}].tool_use_id", block.tool_use_id, _text(block))
            case ThinkingBlock():
                turns.reason(block.thinking)


def _text(block: ToolResultBlock) -> str:
    if isinstance(block.content, str):
        return block.content
    return SEPARATOR.join(part.text for part in block.content)
