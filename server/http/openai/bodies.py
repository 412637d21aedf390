"""The bodies of OpenAI's completions and chat completions, and their requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from pilotfish.engine.errors import Violation, shown
from pilotfish.engine.params import Guided
from pilotfish.engine.types import Request
from pilotfish.server.chat import MAX_MESSAGES, MAX_TOOLS, ChatMessage, Conversation, ToolCall
from pilotfish.server.formats.base import ANY_OBJECT
from pilotfish.server.http.bodies import (
    OPENAI_TEMPERATURE,
    FunctionBody,
    GenerationFields,
    Input,
    TextContent,
    template_arguments,
)
from pilotfish.server.http.fields import (
    MAX_PROMPTS,
    TEXT_OR_LIST,
    Body,
    Flag,
    Ids,
    OneOf,
    Schema,
    Text,
    UInt32,
    at_most,
    goes_with,
    not_served,
    text_of,
)


class JsonSchema(Body):
    """A JSON schema. Its name and description are not used."""

    name: Text | None = None
    description: Text | None = None
    strict: Flag | None = None  # no effect: the schema is always enforced strictly
    schema_: Schema = Field(alias="schema")


class ResponseFormat(Body):
    """The required format of the text."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    _schema_where_it_is_named = goes_with("json_schema", "json_schema")


class StreamOptions(Body):
    """Additional parts of a stream."""

    include_usage: Flag = False
    continuous_usage_stats: Flag = False  # with include_usage: the usage so far in every chunk
    include_obfuscation: Flag = False  # no effect: not needed on loopback or with TLS


class OpenAiBody(GenerationFields):
    """Fields of both OpenAI routes."""

    usual_temperature, uses_model_defaults = OPENAI_TEMPERATURE, True

    n: UInt32 | None = None
    max_tokens: UInt32 | None = None
    stream_options: StreamOptions = StreamOptions()
    response_format: ResponseFormat | None = None
    return_speculation_stats: Flag = False

    @property
    def has_running_usage(self) -> bool:
        """Whether every chunk of a stream reports the usage so far."""
        return self.stream_options.include_usage and self.stream_options.continuous_usage_stats

    def structures(self) -> Iterator[tuple[str, Guided]]:
        yield from super().structures()
        wanted = self.response_format
        if wanted is not None and wanted.json_schema is not None:
            yield "response_format.json_schema.schema", Guided(json_schema=json.dumps(wanted.json_schema.schema_))
        elif wanted is not None and wanted.type == "json_object":
            yield "response_format", Guided(json_schema=ANY_OBJECT)

    def conflicts(self) -> Iterator[Violation]:
        yield from super().conflicts()
        if self.event_ids and self.has_running_usage:
            yield Violation("event_ids", "is true; not supported with stream_options.continuous_usage_stats")


def _kind_of_prompts(value: Any) -> int:
    """0: a text; 1: token ids; 2: several prompts."""
    is_list = isinstance(value, list)
    return is_list + (is_list and bool(value) and isinstance(value[0], str | list))


Prompt = Annotated[Text | Ids, TEXT_OR_LIST]
PromptList = Annotated[list[Prompt], Field(fail_fast=True), at_most(MAX_PROMPTS)]
Prompts = Annotated[Text | Ids | PromptList, OneOf(_kind_of_prompts)]


class CompletionBody(OpenAiBody):
    """Body of `POST /v1/completions`."""

    names: ClassVar = {"token_ids": "prompt", "top_logprobs": "logprobs"}

    prompt: Prompts
    logprobs: UInt32 | None = None  # number of most likely tokens per token; 0: only its own log-probability
    echo: Flag = False
    suffix: Annotated[None, not_served("text is generated only after the prompt")] = None

    @property
    def prompts(self) -> list[Input]:
        is_list = isinstance(self.prompt, list) and bool(self.prompt) and not isinstance(self.prompt[0], int)
        given: list[Any] = self.prompt if is_list else [self.prompt]  # type: ignore[assignment]
        return [tuple(prompt) if isinstance(prompt, list) else prompt for prompt in given]

    @property
    def is_only_scored(self) -> bool:
        """Whether only the prompt is scored, without a completion."""
        return self.echo and self.max_tokens == 0

    def request(self) -> Request:
        request = self.limited(1 if self.is_only_scored else self.max_tokens)  # one token is generated and omitted
        of_prompt = self.logprobs if self.echo else None
        sampling = replace(request.sampling, logprobs=self.logprobs, prompt_logprobs=of_prompt)
        return replace(request, sampling=sampling)

    def conflicts(self) -> Iterator[Violation]:
        yield from super().conflicts()
        if self.event_ids and len(self.prompts) > 1:
            yield Violation("event_ids", f"is true; not supported with several prompts, here {len(self.prompts)}")
        if self.event_ids and self.echo:
            yield Violation("event_ids", "is true; not supported with echo")


class ToolBody(Body):
    """An entry of `tools`."""

    type: Literal["function"]
    function: FunctionBody


Tools = Annotated[list[ToolBody], Field(fail_fast=True), at_most(MAX_TOOLS)]


class ToolChoiceBody(Body):
    """Whether the model must call a function, and which."""

    type: Literal["none", "auto", "required", "function"]
    function: FunctionBody | None = None  # only its name is used
    _function_where_it_is_named = goes_with("function", "function")


def _as_tool_choice(value: Any) -> Any:
    if isinstance(value, dict) and value.get("type") == "allowed_tools":
        raise ValueError("is of type 'allowed_tools', which is not supported; send only the allowed tools as tools")
    if isinstance(value, str) and value not in ("none", "auto", "required"):
        raise ValueError(f"is {shown(value)}; expected 'none', 'auto', 'required' or a function")
    return {"type": value} if isinstance(value, str) else value


ToolChoiceField = Annotated[ToolChoiceBody, BeforeValidator(_as_tool_choice)]


class CalledFunction(Body):
    """The function of a call, and the JSON text of its arguments."""

    name: Text
    arguments: Text = ""


class ToolCallBody(Body):
    """A call that the assistant made."""

    id: Text = ""
    type: Literal["function"] = "function"
    index: UInt32 | None = None  # no effect: a client may send a stream's deltas back
    function: CalledFunction


ToolCalls = Annotated[list[ToolCallBody], Field(fail_fast=True), at_most(MAX_TOOLS)]


_ROLES = {"developer": "system", "function": "tool"}  # newer and older names, which few templates support


class ChatTurn(Body):
    """A message of a conversation."""

    role: Text
    content: TextContent | None = None
    name: Text | None = None
    tool_calls: ToolCalls = []  # noqa: RUF012  # pydantic copies it
    tool_call_id: Text | None = None
    reasoning: Text | None = None
    reasoning_content: Text | None = None  # another name of `reasoning`
    function_call: Annotated[None, not_served("use tool_calls")] = None

    @property
    def message(self) -> ChatMessage:
        return ChatMessage(
            role=_ROLES.get(self.role, self.role),
            content=text_of(self.content),
            name=self.name,
            tool_calls=tuple(
                ToolCall(call.id, call.function.name, call.function.arguments) for call in self.tool_calls
            ),
            tool_call_id=self.tool_call_id,
            reasoning=self.reasoning_content if self.reasoning is None else self.reasoning,
        )


ChatTurns = Annotated[list[ChatTurn], Field(fail_fast=True), at_most(MAX_MESSAGES)]


class ChatBody(OpenAiBody):
    """Body of `POST /v1/chat/completions`."""

    no_input: ClassVar[tuple[str, Any] | None] = ("messages", [])
    names: ClassVar = {
        "prompt": "messages",
        "max_tokens": "max_completion_tokens",
        r"tools\[(\d+)\](?=\.)": r"tools[\2].function",
        r"tool_choice\.name": "tool_choice.function.name",
        r"tool_choice\.mode": "tool_choice",
        "template_arguments": "chat_template_kwargs",
    }

    messages: ChatTurns
    max_completion_tokens: UInt32 | None = None
    logprobs: Flag | None = None
    top_logprobs: UInt32 | None = None
    tools: Tools = []  # noqa: RUF012  # pydantic copies it
    tool_choice: ToolChoiceField | None = None
    parallel_tool_calls: Flag | None = None
    functions: Annotated[None, not_served("use tools")] = None
    function_call: Annotated[None, not_served("use tool_choice")] = None
    add_generation_prompt: Flag | None = None
    continue_final_message: Flag = False
    chat_template_kwargs: Schema | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    thinking_budget: UInt32 | None = None
    thinking_token_budget: UInt32 | None = None  # another name of `thinking_budget`
    return_tokens: Flag = False  # with a stream: each token's text, and whether it was an accepted draft

    def request(self) -> Request:
        max_tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        request = self.limited(max_tokens)
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return replace(
            request,
            sampling=replace(request.sampling, logprobs=logprobs, fit_context=max_tokens is None),
            output=replace(request.output, stop_in_answer=True),
        )

    @property
    def prompts(self) -> list[Input]:
        choice = self.tool_choice
        function = None if choice is None else choice.function
        return [
            Conversation(
                messages=tuple(turn.message for turn in self.messages),
                tools=tuple(tool.function.declared for tool in self.tools),
                tool_choice="auto" if choice is None or choice.type == "function" else choice.type,
                tool_name=None if function is None else function.name,
                parallel_tool_calls=self.parallel_tool_calls is not False,
                template_arguments=template_arguments(self.reasoning_effort, self.verbosity, self.chat_template_kwargs),
                add_generation_prompt=self.add_generation_prompt,
                continue_final_message=self.continue_final_message,
                thinking_budget=self.thinking_token_budget if self.thinking_budget is None else self.thinking_budget,
            )
        ]

    def conflicts(self) -> Iterator[Violation]:
        yield from super().conflicts()
        for i, turn in enumerate(self.messages):
            if turn.content is None and not (
                turn.role == "assistant" and (turn.tool_calls or turn.reasoning or turn.reasoning_content)
            ):
                yield Violation(f"messages[{i}].content", "is missing")
        if self.top_logprobs and not self.logprobs:
            yield Violation("top_logprobs", f"is {self.top_logprobs}; expected logprobs: true with it")
        newer, older = self.max_completion_tokens, self.max_tokens
        if newer is not None and older is not None and newer != older:
            yield Violation("body", f"has max_completion_tokens {newer} and max_tokens {older}; expected one")
        budget, other = self.thinking_budget, self.thinking_token_budget
        if budget is not None and other is not None and budget != other:
            yield Violation("body", f"has thinking_budget {budget} and thinking_token_budget {other}; expected one")
