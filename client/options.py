"""The options of a generation, defined once for all four generating methods."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Required, TypedDict, TypeVar, cast, get_type_hints

from google.protobuf.message import Message

from pilotfish.v1 import generation_pb2 as pb

MessageT = TypeVar("MessageT", bound=Message)
SpeculationMode = Literal["auto", "off", "fixed"]
Verification = Literal["coupled", "rejection"]


class ChatToolCall(TypedDict, total=False):
    """A call that the assistant made; `arguments` is the text of a JSON object."""

    id: str
    name: Required[str]
    arguments: str


class ChatMessage(TypedDict, total=False):
    """One turn of a conversation."""

    role: Required[str]
    content: str
    name: str
    tool_calls: Sequence[ChatToolCall]
    tool_call_id: str
    reasoning: str


class ChatTool(TypedDict, total=False):
    """A function that the model may call; `parameters` is a JSON Schema: its text, or Python values."""

    name: Required[str]
    description: str
    parameters: str | Mapping[str, Any]
    strict: bool


Prompt = str | Sequence[int] | Sequence[ChatMessage]


class GenerateOptions(TypedDict, total=False):
    """Keyword arguments of `generate` and `stream`. The protocol defines their names, units and defaults.

    An omitted option takes the server's default. `speculation` is `speculation.mode` in the protocol. At most one of
    `json_schema` (its text, or the schema as Python values), `regex`, `grammar` and `choice` may be given; they are the
    kinds of `guided`. A negative `seed` is the unsigned number with the same 64 bits. `prediction` is an expected
    output: its text, or token ids. The options from `tools` to `thinking_budget` are for conversations; `tool_choice`
    is auto, none, required, or the name of a tool.
    """

    request_id: str | None
    model: str | None
    adapter: str | None
    priority: int | None
    cache_salt: str | None
    n: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float]
    allowed_token_ids: Sequence[int] | None
    banned_token_ids: Sequence[int]
    seed: int | None
    max_tokens: int | None
    min_tokens: int | None
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool | None
    fit_context: bool | None
    stop_in_answer: bool | None
    stream_interval: int | None
    logprobs: bool | None
    top_logprobs: int | None
    prompt_logprobs: bool | None
    json_schema: str | Mapping[str, Any] | None
    regex: str | None
    grammar: str | None
    choice: Sequence[str] | None
    speculation: SpeculationMode | None
    num_draft_tokens: int | None
    proposer: str | None
    verification: Verification | None
    prediction: str | Sequence[int] | None
    skip_special_tokens: bool | None
    prompt_token_ids: bool | None
    tools: Sequence[ChatTool]
    tool_choice: str | None
    parallel_tool_calls: bool | None
    template_arguments: Mapping[str, Any] | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    thinking_budget: int | None


# Options of conversations only.
_CHAT_NAMES = (
    "tools", "tool_choice", "parallel_tool_calls", "template_arguments", "add_generation_prompt",
    "continue_final_message", "thinking_budget",
)  # fmt: skip
_NAMES = frozenset(get_type_hints(GenerateOptions))


def build_request(prompt: Prompt, options: GenerateOptions) -> pb.GenerateRequest:
    """Build the request for a prompt: text, token ids, or a conversation."""
    if unknown := options.keys() - _NAMES:
        raise TypeError(f"unknown options: {', '.join(sorted(unknown))}")
    request = _given(
        pb.GenerateRequest,
        options,
        sampling=_sampling(options),
        stopping=_stopping(options),
        output=_given(pb.OutputOptions, options),
        speculation=_speculation(options),
        guided=_guided(options),
        prediction=_prediction(options),
    )
    if prompt and not isinstance(prompt, str) and isinstance(prompt[0], Mapping):
        request.messages.CopyFrom(_conversation(cast("Sequence[ChatMessage]", prompt), options))
        return request
    if unused := [name for name in _CHAT_NAMES if options.get(name)]:
        raise TypeError(f"these options require a conversation as the prompt: {', '.join(unused)}")
    if isinstance(prompt, str):
        request.prompt = prompt
    else:
        request.token_ids.CopyFrom(pb.TokenIds(ids=cast("Sequence[int]", prompt)))
    return request


def _given(kind: type[MessageT], options: GenerateOptions, **converted: Any) -> MessageT:
    """Build a message from the options with the names of its fields, except for those that are `converted` already."""
    names = kind.DESCRIPTOR.fields_by_name.keys() - converted.keys()
    return kind(**{name: value for name, value in options.items() if name in names}, **converted)


def _conversation(turns: Sequence[ChatMessage], options: GenerateOptions) -> pb.ChatMessages:
    arguments = options.get("template_arguments")
    return _given(
        pb.ChatMessages,
        options,
        messages=[_message(turn) for turn in turns],
        tools=[_tool(tool) for tool in options.get("tools", ())],
        tool_choice=_tool_choice(options.get("tool_choice")),
        template_arguments=None if arguments is None else json.dumps(arguments),
    )


def _message(turn: ChatMessage) -> pb.ChatMessage:
    fields: dict[str, Any] = dict(turn)
    calls = [pb.ToolCall(**call) for call in fields.pop("tool_calls", ())]
    return pb.ChatMessage(tool_calls=calls, **fields)


def _tool(tool: ChatTool) -> pb.Tool:
    fields: dict[str, Any] = dict(tool)
    if not isinstance(parameters := fields.get("parameters", ""), str):
        fields["parameters"] = json.dumps(parameters)
    return pb.Tool(**fields)


def _tool_choice(choice: str | None) -> pb.ToolChoice | None:
    if choice is None:
        return None
    if choice in ("auto", "none", "required"):
        return pb.ToolChoice(mode=pb.ToolChoiceMode.Value(f"TOOL_CHOICE_MODE_{choice.upper()}"))
    return pb.ToolChoice(name=choice)


def _prediction(options: GenerateOptions) -> pb.Prediction | None:
    predicted = options.get("prediction")
    if predicted is None:
        return None
    if isinstance(predicted, str):
        return pb.Prediction(text=predicted)
    return pb.Prediction(token_ids=pb.TokenIds(ids=predicted))


def _sampling(options: GenerateOptions) -> pb.SamplingParams:
    allowed, seed = options.get("allowed_token_ids"), options.get("seed")
    return _given(
        pb.SamplingParams,
        options,
        seed=None if seed is None else seed % 2**64 if -(2**63) <= seed < 0 else seed,
        allowed_token_ids=None if allowed is None else pb.TokenIds(ids=allowed),
    )


def _guided(options: GenerateOptions) -> pb.GuidedDecoding | None:
    schema, choice = options.get("json_schema"), options.get("choice")
    regex, grammar = options.get("regex"), options.get("grammar")
    if sum(kind is not None for kind in (schema, regex, grammar, choice)) > 1:
        raise TypeError("several structures are given; expected at most one of json_schema, regex, grammar, choice")
    if schema is not None:
        return pb.GuidedDecoding(json_schema=schema if isinstance(schema, str) else json.dumps(schema))
    if regex is not None:
        return pb.GuidedDecoding(regex=regex)
    if grammar is not None:
        return pb.GuidedDecoding(grammar=grammar)
    return None if choice is None else pb.GuidedDecoding(choice=pb.Choice(choices=choice))


def _stopping(options: GenerateOptions) -> pb.StoppingParams:
    if isinstance(stop := options.get("stop"), str):  # each character would be a stop string
        raise TypeError(f"stop is the string {stop!r}; expected a list of strings")
    return _given(pb.StoppingParams, options)


def _speculation(options: GenerateOptions) -> pb.SpeculationOptions:
    mode, verification = options.get("speculation"), options.get("verification")
    return _given(
        pb.SpeculationOptions,
        options,
        mode=pb.SpeculationMode.Value(f"SPECULATION_MODE_{mode.upper()}") if mode else None,
        verification=pb.Verification.Value(f"VERIFICATION_{verification.upper()}") if verification else None,
    )
