"""Fields of the body of `/v1/responses`: names, types and defaults. `requests.py` interprets their values.

Unknown fields are refused by name. Fields that have no effect on the output are declared with a comment that says so,
because agents send them with every request.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from server.admission.conversation import MAX_TOOLS
from server.chat import MAX_MESSAGES
from server.http.agents import AgentBody, Json
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
from server.http.types import ANY_OBJECT, Structure


class ItemPart(Body):
    """A text in the content of a message, or in the output of a call."""

    ignored = frozenset({"annotations", "logprobs", "prompt_cache_breakpoint"})  # every prompt is cached
    type: Literal["input_text", "output_text", "text"]
    text: Text


PartList = Annotated[list[Annotated[ItemPart, of_types(ItemPart)]], Field(fail_fast=True), at_most(MAX_PARTS)]
Content = Annotated[Annotated[Text, TEXT] | Annotated[PartList, PARTS], TEXT_OR_PARTS]


class Item(Body):
    """Base of the items of a conversation."""

    ignored = frozenset(
        {"id", "status", "internal_chat_message_metadata_passthrough"}
    )  # nothing is stored, so nothing can be referred to


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


class FunctionCallItem(Item):
    """A call of a function."""

    ignored = Item.ignored | frozenset({"caller"})
    type: Literal["function_call"]
    call_id: Text
    name: Text
    namespace: Text | None = None
    arguments: Text


class CustomCallItem(Item):
    """A call of a custom tool."""

    ignored = Item.ignored | frozenset({"caller"})
    type: Literal["custom_tool_call"]
    call_id: Text
    name: Text
    namespace: Text | None = None
    input: Text


class CallOutputItem(Item):
    """The result of a call."""

    ignored = Item.ignored | frozenset({"name", "caller"})  # the call has the name
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Text
    output: Content


InputItem = Annotated[
    Annotated[
        MessageItem | ReasoningItem | FunctionCallItem | CustomCallItem | CallOutputItem, Field(discriminator="type")
    ],
    of_types(
        MessageItem,
        ReasoningItem,
        FunctionCallItem,
        CustomCallItem,
        CallOutputItem,
        default=lambda item: "message" if "role" in item else None,
    ),
]

ItemList = Annotated[list[InputItem], Field(fail_fast=True), at_most(MAX_MESSAGES)]


class FunctionTool(Body):
    """A function that the model may call."""

    type: Literal["function"]
    name: Text
    description: Text = ""
    parameters: Schema | None = None
    strict: Flag = False


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


class NamespaceTool(Body):
    """Functions whose names are of their own in a namespace."""

    type: Literal["namespace"]
    name: Text
    description: Text = ""
    tools: Annotated[
        list[
            Annotated[
                Annotated[FunctionTool | CustomTool, Field(discriminator="type")], of_types(FunctionTool, CustomTool)
            ]
        ],
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


OfferedTool = Annotated[
    Annotated[FunctionTool | CustomTool | NamespaceTool | SearchTool, Field(discriminator="type")],
    of_types(FunctionTool, CustomTool, NamespaceTool, SearchTool),
]


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
        """Yield the structures of all routes, and the one of `text`."""
        yield from super().structures()
        wanted = self.text.format
        if wanted is not None and wanted.schema_ is not None:
            yield Structure("text.format.schema", "json", wanted.schema_)
        elif wanted is not None and wanted.type != "text":
            yield Structure("text.format", "json", ANY_OBJECT)

    def names(self) -> dict[str, str]:
        """Return the names of all routes, and those of this route's own fields."""
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
