"""Anthropic's Messages API: bodies, their requests, and answers as lists of blocks.

Unknown fields are refused by name. Fields without effect are declared, with a comment, because agents send them with
every request.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from pilotfish.engine.errors import InvalidRequest
from pilotfish.engine.params import Guided
from pilotfish.engine.types import FinishedOutput, FinishReason, Request
from pilotfish.server.chat import MAX_MESSAGES, MAX_TOOLS, ChatMessage, Conversation
from pilotfish.server.formats.json_text import object_in
from pilotfish.server.http.agents import SEPARATOR, AgentAnswer, AgentBody, AnswerPart, Turns
from pilotfish.server.http.bodies import FunctionBody, Input, ParsedBody, template_arguments
from pilotfish.server.http.calls import Json
from pilotfish.server.http.errors import MESSAGES, HttpError
from pilotfish.server.http.fields import (
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
from pilotfish.server.model import ServedModel
from pilotfish.server.streams.stream import OutputStream


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
    is_error: Flag = False  # no effect: templates have no field for it, and the text contains the error


class ThinkingBlock(Body):
    """Reasoning of the model."""

    ignored = frozenset({"signature"})
    type: Literal["thinking"]
    thinking: Text


class RedactedThinkingBlock(Body):
    """Reasoning encrypted by another server. It has no effect."""

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
    """Whether the model must call a tool, and which."""

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
    """Options of the answer."""

    effort: Text | None = None
    format: OutputFormat | None = None


# Tool choices by Anthropic's names; all others are "auto".
_CHOICES: dict[str, Any] = {"any": "required", "none": "none"}
# Template variables by the type of thinking; for "adaptive" the template decides.
_THINKS = {"enabled": {"enable_thinking": True}, "disabled": {"enable_thinking": False}}


class ConversationBody(AgentBody):
    """Body of `POST /v1/messages/count_tokens`."""

    names: ClassVar = {
        "prompt": "messages",
        "thinking_budget": "thinking.budget_tokens",
        r"tools\[(\d+)\]\.parameters": r"tools[\2].input_schema",
        r"tool_choice\.mode": "tool_choice.type",
        "stop": "stop_sequences",
    }
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
                # For a model without reasoning markers the budget is dropped later.
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

    def structures(self) -> Iterator[tuple[str, Guided]]:
        yield from super().structures()
        if self.output_config.format is not None:
            yield "output_config.format.schema", Guided(json_schema=json.dumps(self.output_config.format.schema_))


class MessagesBody(ConversationBody):
    """Body of `POST /v1/messages`."""

    max_tokens: UInt32
    stop_sequences: Texts = []  # noqa: RUF012

    def request(self) -> Request:
        request = self.limited(self.max_tokens)
        stop = (*request.sampling.stop, *self.stop_sequences)
        return replace(request, sampling=replace(request.sampling, stop=stop))


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


SIGNATURE = "unsigned"  # signature of reasoning; without one, clients drop it from the conversation


class MessagesAnswer(AgentAnswer):
    """An answer of `/v1/messages`."""

    def __init__(self, read: ParsedBody[Any], streams: Sequence[OutputStream], model: ServedModel) -> None:
        super().__init__(read, streams, model)
        self._message: Json = {
            "id": f"msg_{self._request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(len(streams[0].request.token_ids)),
        }

    def _begin(self) -> list[Json]:
        return [{"type": "message_start", "message": dict(self._message)}, {"type": "ping"}]

    def _opened(self, part: AnswerPart) -> list[Json]:
        return [{"type": "content_block_start", "index": part.index, "content_block": _block(part)}]

    def _grown(self, part: AnswerPart, text: str) -> list[Json]:
        match part.kind:
            case "reasoning":
                return [_delta(part, {"type": "thinking_delta", "thinking": text})]
            case "call":
                return [_delta(part, {"type": "input_json_delta", "partial_json": text})]
        return [_delta(part, {"type": "text_delta", "text": text})]

    def _closed(self, part: AnswerPart) -> list[Json]:
        signed = [_delta(part, {"type": "signature_delta", "signature": SIGNATURE})] * (part.kind == "reasoning")
        return [*signed, {"type": "content_block_stop", "index": part.index}]

    def _end(self, finished: FinishedOutput, reasoning_tokens: int) -> list[Json]:
        stopped = {"stop_reason": self._stop_reason(finished), "stop_sequence": finished.stop_string}
        usage = _usage(finished.prompt_tokens, finished.cached_prompt_tokens, finished.completion_tokens)
        usage |= {"output_tokens_details": {"thinking_tokens": reasoning_tokens}}
        self._message |= stopped | {"usage": usage}
        last: list[Json] = [{"type": "message_delta", "delta": stopped, "usage": usage}, {"type": "message_stop"}]
        return [*self._close("completed"), *last]

    def failure(self, error: HttpError) -> list[Json]:
        return [error.body(MESSAGES)]

    def _whole(self) -> Json:
        return self._message | {"content": [*map(_block, self._parts)]}

    def _stop_reason(self, finished: FinishedOutput) -> str:
        if finished.reason is FinishReason.LENGTH:
            return "max_tokens"
        if finished.stop_string is not None:
            return "stop_sequence"
        return "tool_use" if any(part.kind == "call" for part in self._parts) else "end_turn"


def _delta(part: AnswerPart, delta: Json) -> Json:
    return {"type": "content_block_delta", "index": part.index, "delta": delta}


def _block(part: AnswerPart) -> Json:
    match part.kind:
        case "reasoning":
            return {"type": "thinking", "thinking": part.text, "signature": SIGNATURE if part.texts else ""}
        case "call":
            return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": object_in(part.text) or {}}
    return {"type": "text", "text": part.text}


def _usage(prompt_tokens: int, cached: int = 0, completion_tokens: int = 0) -> Json:
    """Return the usage. In this format input tokens exclude cached ones."""
    return {
        "input_tokens": prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": completion_tokens,
    }
