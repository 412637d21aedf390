"""Fields of the bodies of `/v1/messages`: names, types and defaults, and the request that they make.

Unknown fields are refused by name. Fields without effect on the output are declared, with a comment, because agents
send them with every request.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from engine.errors import InvalidRequest
from engine.types import Request
from server.chat import MAX_MESSAGES, MAX_TOOLS, ChatMessage, Conversation
from server.http.agents import SEPARATOR, AgentBody, Turns
from server.http.bodies import FunctionBody, Input, Structure, template_arguments
from server.http.fields import (
    MAX_PARTS,
    TEXT_OR_LIST,
    Body,
    ByType,
    Flag,
    Schema,
    Text,
    Texts,
    UInt32,
    at_most,
    goes_with,
    text_of,
)


class Block(Body):
    """Base of the blocks of a message."""

    ignored = frozenset({"cache_control"})  # every prompt is cached


class TextBlock(Block):
    """A text."""

    ignored = Block.ignored | frozenset({"citations"})
    type: Literal["text"]
    text: Text


TextBlockList = Annotated[list[Annotated[TextBlock, ByType()]], Field(fail_fast=True), at_most(MAX_PARTS)]

TextBlocks = Annotated[Text | TextBlockList, TEXT_OR_LIST]


class ToolUseBlock(Block):
    """A call of a function."""

    ignored = Block.ignored | frozenset({"caller"})
    type: Literal["tool_use"]
    id: Text
    name: Text
    input: Schema


class ToolResultBlock(Block):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: Text
    content: TextBlocks = ""
    is_error: Flag = False  # no effect: no template has a place for it, and the text contains the error


class ThinkingBlock(Body):
    """Reasoning of the model."""

    ignored = frozenset({"signature"})
    type: Literal["thinking"]
    thinking: Text


class RedactedThinkingBlock(Body):
    """Reasoning that another server has sealed. It has no effect."""

    ignored = frozenset({"data"})
    type: Literal["redacted_thinking"]


Blocks = TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock
BlockList = Annotated[list[Annotated[Blocks, ByType()]], Field(fail_fast=True), at_most(MAX_PARTS)]
_BLOCKS_OF = {
    "user": ("text", "tool_result"),
    "system": ("text",),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
}


class MessageTurn(Body):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[Text | BlockList, TEXT_OR_LIST]

    @model_validator(mode="after")
    def _blocks_where_they_belong(self) -> MessageTurn:
        for block in self.content if isinstance(self.content, list) else ():
            if block.type not in _BLOCKS_OF[self.role]:
                raise ValueError(f"has a block of type {block.type!r} in a message of role {self.role!r}")
        return self


class ClientTool(FunctionBody):
    """A function that the model may call."""

    ignored = Block.ignored | frozenset({"eager_input_streaming"})  # see `docs/api.md` for when arguments are sent
    type: Literal["custom"]
    parameters: Schema | None = Field(alias="input_schema")


class AnyToolChoice(Body):
    """Whether, or what, the model has to call."""

    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = None
    disable_parallel_tool_use: Flag = False
    _name_where_it_belongs = goes_with("tool", "name")


class ThinkingFields(Body):
    """How to reason."""

    ignored = frozenset({"display"})  # the reasoning itself is sent
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: UInt32 | None = None


class OutputFormat(Body):
    """The required format of the text."""

    type: Literal["json_schema"]
    schema_: Schema = Field(alias="schema")


class OutputFields(Body):
    """What the answer has to be like."""

    effort: Text | None = None
    format: OutputFormat | None = None


_NAMES = {
    "prompt": "messages",
    "thinking_budget": "thinking.budget_tokens",
    r"tools\[(\d+)\]\.parameters": r"tools[\2].input_schema",
    r"tool_choice\.mode": "tool_choice.type",
}


# What they call a choice of tools; all others are "auto".
_CHOICES: dict[str, Any] = {"any": "required", "none": "none"}
# Variables of the template by the type of thinking; what "adaptive" leaves to the model is left to the template.
_THINKS = {"enabled": {"enable_thinking": True}, "disabled": {"enable_thinking": False}}


class ConversationBody(AgentBody):
    """Body of `POST /v1/messages/count_tokens`."""

    ignored = frozenset({"cache_control", "context_management"})  # the whole conversation is read
    messages: Annotated[list[MessageTurn], Field(fail_fast=True), at_most(MAX_MESSAGES)]
    system: TextBlocks = ""
    tools: Annotated[
        list[Annotated[ClientTool, ByType(lambda _: "custom")]],
        Field(fail_fast=True),
        at_most(MAX_TOOLS),
    ] = []  # noqa: RUF012  # pydantic copies it
    tool_choice: AnyToolChoice = AnyToolChoice(type="auto")
    thinking: ThinkingFields | None = None
    output_config: OutputFields = OutputFields()

    def request(self) -> Request:
        return Request(model=self.model)

    @property
    def prompts(self) -> list[Input]:
        turns, choice, thinking = self._turns(), self.tool_choice, self.thinking
        thinks = None if thinking is None else _THINKS.get(thinking.type)
        return [
            Conversation(
                messages=turns,
                tools=tuple(tool.declared for tool in self.tools),
                tool_choice=_CHOICES.get(choice.type, "auto"),
                tool_name=choice.name,
                parallel_tool_calls=not choice.disable_parallel_tool_use,
                template_arguments=template_arguments(self.output_config.effort, named=thinks),
                continue_final_message=turns[-1].role == "assistant",
                # For a model that marks no reasoning the budget is dropped later.
                thinking_budget=thinking.budget_tokens if thinking is not None and thinking.type == "enabled" else None,
            )
        ]

    def _turns(self) -> tuple[ChatMessage, ...]:
        if not self.messages:
            raise InvalidRequest.of("messages", "is []; expected at least one message")
        turns = Turns()
        for text in [self.system] if isinstance(self.system, str) else [block.text for block in self.system]:
            turns.instruct(text)
        for i, turn in enumerate(self.messages):
            _add(turns, turn, f"messages[{i}].content")
        return turns.messages()

    def structures(self) -> Iterator[Structure]:
        yield from super().structures()
        if self.output_config.format is not None:
            yield Structure("output_config.format.schema", "json", self.output_config.format.schema_)

    def names(self) -> dict[str, str]:
        return super().names() | _NAMES


class MessagesBody(ConversationBody):
    """Body of `POST /v1/messages`."""

    max_tokens: UInt32
    stop_sequences: Texts = []  # noqa: RUF012

    def request(self) -> Request:
        request = self.limited(self.max_tokens)
        stop = (*request.sampling.stop, *self.stop_sequences)
        return replace(request, sampling=replace(request.sampling, stop=stop))

    def names(self) -> dict[str, str]:
        return super().names() | ({} if self.stop else {"stop": "stop_sequences"})


def _add(turns: Turns, turn: MessageTurn, field: str) -> None:
    add = {"user": turns.ask, "system": turns.instruct, "assistant": turns.answer}[turn.role]
    if isinstance(turn.content, str):
        add(turn.content)
        return
    for i, block in enumerate(turn.content):
        match block:
            case TextBlock():
                add(block.text)
            case ToolUseBlock():
                turns.call(block.id, block.name, json.dumps(block.input, ensure_ascii=False))
            case ToolResultBlock():
                turns.result(f"{field}[{i}].tool_use_id", block.tool_use_id, text_of(block.content, SEPARATOR))
            case ThinkingBlock():
                turns.reason(block.thinking)
