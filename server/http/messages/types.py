"""Fields of the bodies of `/v1/messages`: names, types and defaults. `requests.py` interprets their values.

Unknown fields are refused by name. Fields that have no effect on the output are declared with a comment that says so,
because agents send them with every request.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, model_validator

from server.admission.conversation import MAX_TOOLS
from server.chat import MAX_MESSAGES
from server.http.agents import AgentBody
from server.http.fields import (
    MAX_PARTS,
    PARTS,
    TEXT,
    TEXT_OR_PARTS,
    Body,
    Flag,
    Schema,
    Text,
    Texts,
    UInt32,
    at_most,
    of_types,
)
from server.http.types import Structure


class Block(Body):
    """Base of the blocks of a message."""

    ignored = frozenset({"cache_control"})  # every prompt is cached


class TextBlock(Block):
    """A text."""

    ignored = Block.ignored | frozenset({"citations"})
    type: Literal["text"]
    text: Text


TextBlockList = Annotated[list[Annotated[TextBlock, of_types(TextBlock)]], Field(fail_fast=True), at_most(MAX_PARTS)]

TextBlocks = Annotated[Annotated[Text, TEXT] | Annotated[TextBlockList, PARTS], TEXT_OR_PARTS]


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
    is_error: Flag = False  # no effect: no template has a place for it, and the text tells


class ThinkingBlock(Body):
    """Reasoning of the model."""

    ignored = frozenset({"signature"})
    type: Literal["thinking"]
    thinking: Text


class RedactedThinkingBlock(Body):
    """Reasoning that another server has sealed. It has no effect."""

    ignored = frozenset({"data"})
    type: Literal["redacted_thinking"]


AnyBlock = Annotated[
    Annotated[
        TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock, Field(discriminator="type")
    ],
    of_types(TextBlock, ToolUseBlock, ToolResultBlock, ThinkingBlock, RedactedThinkingBlock),
]


BlockList = Annotated[list[AnyBlock], Field(fail_fast=True), at_most(MAX_PARTS)]
_BLOCKS_OF = {
    "user": ("text", "tool_result"),
    "system": ("text",),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
}


class MessageTurn(Body):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[Annotated[Text, TEXT] | Annotated[BlockList, PARTS], TEXT_OR_PARTS]

    @model_validator(mode="after")
    def _blocks_where_they_belong(self) -> MessageTurn:
        for block in self.content if isinstance(self.content, list) else ():
            if block.type not in _BLOCKS_OF[self.role]:
                raise ValueError(f"has a block of type {block.type!r} in a message of role {self.role!r}")
        return self


class ClientTool(Block):
    """A function that the model may call."""

    ignored = Block.ignored | frozenset({"eager_input_streaming"})  # see `docs/api.md` for when arguments are sent
    type: Literal["custom"]
    name: Text
    description: Text = ""
    input_schema: Schema
    strict: Flag = False


class AnyToolChoice(Body):
    """Whether, or what, the model has to call."""

    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = None
    disable_parallel_tool_use: Flag = False

    @model_validator(mode="after")
    def _name_where_it_belongs(self) -> AnyToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError(f"is of type {self.type!r}; a name goes with the type tool and with no other")
        return self


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


class ConversationBody(AgentBody):
    """Body of `POST /v1/messages/count_tokens`."""

    ignored = frozenset({"cache_control", "context_management"})  # the whole conversation is read
    messages: Annotated[list[MessageTurn], Field(fail_fast=True), at_most(MAX_MESSAGES)]
    system: TextBlocks = ""
    tools: Annotated[
        list[Annotated[ClientTool, of_types(ClientTool, default=lambda _: "custom")]],
        Field(fail_fast=True),
        at_most(MAX_TOOLS),
    ] = []  # noqa: RUF012  # pydantic copies it
    tool_choice: AnyToolChoice = AnyToolChoice(type="auto")
    thinking: ThinkingFields | None = None
    output_config: OutputFields = OutputFields()

    def structures(self) -> Iterator[Structure]:
        """Yield the structures of all routes, and the one of `output_config`."""
        yield from super().structures()
        if self.output_config.format is not None:
            yield Structure("output_config.format.schema", "json", self.output_config.format.schema_)

    def names(self) -> dict[str, str]:
        """Return the names of all routes, and those of this route's own fields."""
        return super().names() | _NAMES


class MessagesBody(ConversationBody):
    """Body of `POST /v1/messages`."""

    max_tokens: UInt32
    stop_sequences: Texts = []  # noqa: RUF012

    def names(self) -> dict[str, str]:
        """Return the names of a conversation, and those of fields about its answer."""
        return super().names() | ({} if self.stop else {"stop": "stop_sequences"})
