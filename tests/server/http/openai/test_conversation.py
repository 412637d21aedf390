"""Conversations, tools and predictions of bodies, as the messages that they become."""

from __future__ import annotations

import json
from dataclasses import fields as dataclass_fields
from dataclasses import is_dataclass

import pytest

from pilotfish.engine.params import Guided
from pilotfish.server.http.bodies import GenerateBody
from pilotfish.server.http.openai.bodies import ChatBody, CompletionBody

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"name": "weather", "description": "d", "strict": True}
TOOLS = [
    {"type": "function", "function": WEATHER | {"parameters": SCHEMA}},
    {"type": "function", "function": {"name": "time"}},
]
USER = {"role": "user", "content": "u"}


def chat(**fields):
    """The fields of a body's conversation that differ from their defaults."""
    body = ChatBody.model_validate({"messages": [USER]} | fields)
    assert not list(body.conflicts())
    return _given(body.prompts[0])


def _given(value):
    if isinstance(value, tuple):
        return [*map(_given, value)]
    if not is_dataclass(value):
        return value
    given = {about.name: getattr(value, about.name) for about in dataclass_fields(value)}
    defaults = {about.name: about.default for about in dataclass_fields(value)}
    return {name: _given(found) for name, found in given.items() if found != defaults[name]}


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
    assert chat(messages=turns)["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "ab", "name": "Ann"},
        {"role": "assistant", "tool_calls": [{"id": "c1", "name": "weather", "arguments": '{"city": "Kiel"}'}]},
        {"role": "tool", "content": "rain", "tool_call_id": "c1"},
        {"role": "tool", "content": "noon", "name": "time"},
        {"role": "assistant", "content": "wet", "reasoning": "hm"},
        {"role": "assistant", "reasoning": "so"},
    ]


NAMED = {"type": "function", "function": {"name": "time"}}


@pytest.mark.parametrize(
    ("choice", "sent", "may_call"),
    [
        (None, {}, ["weather", "time"]),
        ("auto", {}, ["weather", "time"]),
        ("none", {"tool_choice": "none"}, []),
        ("required", {"tool_choice": "required"}, ["weather", "time"]),
        (NAMED, {"tool_name": "time"}, ["time"]),
    ],
    ids=str,
)
def test_tools_and_the_choice_of_one(choice, sent, may_call):
    asked = chat(tools=TOOLS, tool_choice=choice)
    assert asked["tools"] == [WEATHER | {"parameters": json.dumps(SCHEMA)}, {"name": "time"}]
    assert {name: asked[name] for name in ("tool_choice", "tool_name") if name in asked} == sent
    body = ChatBody.model_validate({"messages": [USER], "tools": TOOLS, "tool_choice": choice})
    [conversation] = body.prompts
    assert [tool.name for tool in conversation.callable_tools] == may_call


@pytest.mark.parametrize(
    ("fields", "arguments"),
    [
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
    assert json.loads(chat(**fields)["template_arguments"]) == arguments


def test_what_else_the_template_and_the_structure_depend_on():
    for fields in (
        {},
        {"parallel_tool_calls": False, "add_generation_prompt": False, "thinking_budget": 7},
        {"thinking_budget": 0, "continue_final_message": True},
    ):
        assert chat(**fields) == {"messages": [USER]} | fields
    assert chat(thinking_token_budget=7)["thinking_budget"] == 7


@pytest.mark.parametrize(
    "prediction",
    [
        {"type": "content", "content": "a b"},
        {"type": "content", "content": [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]},
        "a b",
    ],
    ids=str,
)
def test_a_prediction_in_every_form(prediction):
    for kind, fields in (
        (ChatBody, {"messages": [USER]}),
        (CompletionBody, {"prompt": "p"}),
        (GenerateBody, {"prompt": "p"}),
    ):
        assert kind.model_validate(fields | {"prediction": prediction}).predicted == "a b"
        assert kind.model_validate(fields).predicted is None


@pytest.mark.parametrize(
    ("wanted", "kind", "source"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema", '{"type": "object"}'),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"a": 1}}}}, "json_schema", '{"a": 1}'),
        ({"response_format": {"type": "text"}}, None, None),
        ({"guided_json": {"a": 1}}, "json_schema", '{"a": 1}'),
        ({"guided_choice": ["a", "b"]}, "choice", ("a", "b")),
        ({"structured_outputs": {"json": {"type": "array"}}}, "json_schema", '{"type": "array"}'),
        ({"structured_outputs": {"json": "true"}}, "json_schema", "true"),
        ({"structured_outputs": {"json_object": True}}, "json_schema", '{"type": "object"}'),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"structured_outputs": {"grammar": "start: /a/"}}, "grammar", "start: /a/"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", ("a", "b")),
        ({"structured_outputs": {"json_object": False}}, None, None),
    ],
    ids=str,
)
def test_structures_by_all_of_their_names(wanted, kind, source):
    found = CompletionBody.model_validate({"prompt": "p"} | wanted).request().sampling.guided
    assert found == (None if kind is None else Guided(**{kind: source}))


def test_special_tokens_are_skipped_as_the_caller_says():
    for value in (True, False, None):
        request = GenerateBody.model_validate({"prompt": "p", "skip_special_tokens": value}).request()
        assert request.output.skip_special_tokens is value
