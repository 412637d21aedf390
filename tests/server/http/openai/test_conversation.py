"""Conversations, tools and predictions of bodies, as the messages that they become."""

from __future__ import annotations

import json

import pytest
from google.protobuf.json_format import MessageToDict

from pilotfish.v1 import generation_pb2 as pb
from server.http.openai.conversation import callable_tools
from server.http.requests import messages_of
from server.http.types import ChatBody, CompletionBody, GenerateBody

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "d", "parameters": SCHEMA, "strict": True}},
    {"type": "function", "function": {"name": "time"}},
]
USER = {"role": "user", "content": "u"}


def chat(**fields):
    """The conversation of a body."""
    body = ChatBody.model_validate({"messages": [USER]} | fields)
    assert not list(body.conflicts())
    [message] = messages_of(body)
    return message.messages


def shown(message):
    return MessageToDict(message, preserving_proto_field_name=True)


def test_every_kind_of_turn():
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Kiel"}'}}
    turns = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "Ann"},
        {"role": "assistant", "content": None, "tool_calls": [call | {"index": 0}], "refusal": None, "annotations": []},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        {"role": "function", "name": "time", "content": "noon"},
        {"role": "assistant", "content": "wet", "reasoning_content": "hm"},
        {"role": "assistant", "reasoning": "so"},
    ]
    assert [shown(turn) for turn in chat(messages=turns).messages] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "ab", "name": "Ann"},
        {"role": "assistant", "tool_calls": [{"id": "c1", "name": "weather", "arguments": '{"city": "Kiel"}'}]},
        {"role": "tool", "content": "rain", "tool_call_id": "c1"},
        {"role": "tool", "content": "noon", "name": "time"},
        {"role": "assistant", "content": "wet", "reasoning": "hm"},
        {"role": "assistant", "reasoning": "so"},
    ]


def test_tools_are_passed_on():
    weather, time = chat(tools=TOOLS).tools
    assert (weather.name, weather.description, weather.strict) == ("weather", "d", True)
    assert json.loads(weather.parameters) == SCHEMA
    assert (time.name, time.description, time.parameters, time.strict) == ("time", "", "", False)


NAMED = {"type": "function", "function": {"name": "time"}}


@pytest.mark.parametrize(
    ("choice", "sent", "may_call"),
    [
        (None, pb.ToolChoice(), ["weather", "time"]),
        ("auto", pb.ToolChoice(mode=pb.TOOL_CHOICE_MODE_AUTO), ["weather", "time"]),
        ("none", pb.ToolChoice(mode=pb.TOOL_CHOICE_MODE_NONE), []),
        ("required", pb.ToolChoice(mode=pb.TOOL_CHOICE_MODE_REQUIRED), ["weather", "time"]),
        (NAMED, pb.ToolChoice(name="time"), ["time"]),
    ],
    ids=str,
)
def test_the_choice_of_a_tool(choice, sent, may_call):
    asked = chat(tools=TOOLS, tool_choice=choice)
    assert asked.tool_choice == sent
    assert asked.HasField("tool_choice") == (choice is not None)
    body = ChatBody.model_validate({"messages": [USER], "tools": TOOLS, "tool_choice": choice})
    assert [tool.name for tool in callable_tools(body.tools, body.tool_choice)] == may_call


@pytest.mark.parametrize(
    ("fields", "arguments"),
    [
        ({}, None),
        ({"reasoning_effort": "high"}, {"reasoning_effort": "high"}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False}),
        ({"verbosity": "low"}, {"verbosity": "low"}),
        ({"chat_template_kwargs": {"a": [1]}, "verbosity": "low"}, {"a": [1], "verbosity": "low"}),
        (
            {"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "none"},
            {"reasoning_effort": "none", "enable_thinking": True},
        ),
    ],
    ids=str,
)
def test_variables_of_the_template(fields, arguments):
    asked = chat(**fields)
    assert asked.HasField("template_arguments") == (arguments is not None)
    assert arguments is None or json.loads(asked.template_arguments) == arguments


def test_what_else_the_template_and_the_structure_depend_on():
    nothing = chat()
    for name in ("parallel_tool_calls", "add_generation_prompt", "thinking_budget"):
        assert not nothing.HasField(name)
    assert not nothing.continue_final_message
    asked = chat(parallel_tool_calls=False, add_generation_prompt=False, thinking_token_budget=7)
    assert (asked.parallel_tool_calls, asked.add_generation_prompt, asked.thinking_budget) == (False, False, 7)
    assert asked.HasField("parallel_tool_calls")
    assert chat(thinking_budget=0).HasField("thinking_budget")
    assert chat(continue_final_message=True).continue_final_message


@pytest.mark.parametrize(
    "prediction",
    [
        {"type": "content", "content": "a b"},
        {"type": "content", "content": [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]},
        "a b",
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("kind", "fields"),
    [(ChatBody, {"messages": [USER]}), (CompletionBody, {"prompt": "p"}), (GenerateBody, {"prompt": "p"})],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_prediction_in_every_form(kind, fields, prediction):
    [message] = messages_of(kind.model_validate(fields | {"prediction": prediction}))
    assert message.prediction.text == "a b"
    [message] = messages_of(kind.model_validate(fields))
    assert not message.HasField("prediction")


@pytest.mark.parametrize(
    ("wanted", "kind", "source"),
    [
        ({"json": {"type": "array"}}, "json_schema", '{"type": "array"}'),
        ({"json": "true"}, "json_schema", "true"),
        ({"json_object": True}, "json_schema", '{"type": "object"}'),
        ({"regex": "a+"}, "regex", "a+"),
        ({"grammar": "start: /a/"}, "grammar", "start: /a/"),
        ({"choice": ["a", "b"]}, "choice", pb.Choice(choices=["a", "b"])),
        ({"json_object": False}, None, None),
    ],
    ids=str,
)
def test_structures_by_their_newer_name(wanted, kind, source):
    [message] = messages_of(GenerateBody.model_validate({"prompt": "p", "structured_outputs": wanted}))
    assert message.guided.WhichOneof("constraint") == kind
    assert kind is None or getattr(message.guided, kind) == source


def test_special_tokens_are_skipped_as_the_caller_says():
    for value in (True, False, None):
        [message] = messages_of(GenerateBody.model_validate({"prompt": "p", "skip_special_tokens": value}))
        assert message.output.HasField("skip_special_tokens") == (value is not None)
        assert message.output.skip_special_tokens == bool(value)
