"""The routes that agents call, side by side: what asks for an answer, what it says, and how its stream is put together.

And a server to talk to: a fake engine whose text is planned, and a template that tells all that it is given.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pilotfish.server.chat import ChatTemplate
from pilotfish.server.formats.base import ReasoningMarks
from pilotfish.server.formats.json_calls import HermesFormat
from tests.engine.text.test_codec import CODEC, END
from tests.server.fake_engine import FakeEngine, served
from tests.server.http import interfaces
from tests.server.http.interfaces import INTERFACES, Interface, Json, events_in
from tests.server.test_life import metric

Part = tuple[str, str]  # what kind of part of an answer, and its text

TEMPLATE = """{% for t in tools or [] %}[{{ t.function | tojson }}]{% endfor %}
{%- if enable_thinking is defined %}[enable_thinking {{ enable_thinking }}]{% endif %}
{%- if reasoning_effort is defined %}[effort {{ reasoning_effort }}]{% endif %}
{%- if verbosity is defined %}[verbosity {{ verbosity }}]{% endif %}
{%- for m in messages %}<{{ m.role }}{% if m.tool_call_id %} {{ m.tool_call_id }} {{ m.name }}{% endif %}>
{%- if m.reasoning %}({{ m.reasoning }}){% endif %}{{ m.content }}
{%- for c in m.tool_calls or [] %}[{{ c.id }} {{ c.function | tojson }}]{% endfor %}
{%- endfor %}
{%- if add_generation_prompt %}<go>{% endif %}"""

REASONING, SAID, ASKED = "Let me see: ü?", "I look.", {"city": "Oslo", "days": [1, 2]}
CALL = f"<tool_call>\n{json.dumps({'name': 'weather', 'arguments': ASKED})}\n</tool_call>"
PLAN = f"<think>\n{REASONING}\n</think>\n\n{SAID}\n{CALL}"
PARTS = [("reasoning", REASONING), ("text", SAID), ("call", json.dumps(ASKED))]
[END_ID] = CODEC.encode(END)
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "weather", "description": "Tells it.", "parameters": WEATHER}
USER = [{"role": "user", "content": "hi"}]


def say(server, text, burst=3):
    """Let the model say this text from now on, so many tokens in a step; and end, as every `Dialect` asks it to."""
    server.engine.script, server.engine._burst = (*CODEC.encode(text), END_ID), burst


def talking(*, model_format=None, compile_grammar=None, **options):
    """A server whose model says `SAID`, OpenAI's official client and a plain one."""
    engine = FakeEngine()
    engine.script = (*CODEC.encode(SAID), END_ID)
    fields = {"chat": ChatTemplate(TEMPLATE, {}), "format": model_format or HermesFormat(reasoning=ReasoningMarks())}
    model = served(engine, CODEC, compile_grammar=compile_grammar, **fields)
    return interfaces.talking(engine, load=lambda _config, _progress: model, **options)


def prompt_of(server, number=-1):
    """The text of the prompt of one request."""
    return CODEC.decode(server.engine.requests[number].token_ids)


def without_ids(value):
    """Compare answers of two requests: their ids and their times differ."""
    if isinstance(value, list):
        return [without_ids(entry) for entry in value]
    if isinstance(value, dict):
        changing = ("id", "call_id", "item_id", "created_at", "created")
        return {name: without_ids(entry) for name, entry in value.items() if name not in changing}
    return value


class Counted(NamedTuple):
    """The tokens of an answer."""

    prompt: int
    cached: int
    output: int
    reasoning: int


@dataclass(frozen=True, slots=True)
class Dialect:
    """A route.

    Args:
        fields: of a body that asks for an answer, with enough tokens.
        tool: `FUNCTION` as this route has it.
        no_calls: the choice of no tool.
        structure: fields that ask for an object of the schema `WEATHER`.
        parts: the reasoning, the text and the arguments of the calls of an answer.
        counted: its tokens.
        why: why it ended, as one of `ends`: with a call, with a text, and for want of tokens.
        assembled: the answer that the events of a stream make, put together as the API's documentation says.
    """

    interface: Interface
    fields: Json
    tool: Json
    no_calls: Any
    structure: Json
    parts: Callable[[Json], list[Part]]
    counted: Callable[[Json], Counted]
    why: Callable[[Json], str]
    ends: tuple[str, str, str]
    assembled: Callable[[Sequence[Json]], Json]

    @property
    def path(self) -> str:
        return self.interface.path

    @property
    def body(self) -> Json:
        """The least that every request has: it ends at `END_ID`."""
        return {"model": "fake", self.interface.limit: 300, "stop_token_ids": [END_ID], **self.fields}

    def call_ids(self, answer: Json) -> list[str]:
        """The ids of the calls of an answer, which has no other parts."""
        if "choices" in answer:
            return [call["id"] for call in answer["choices"][0]["message"]["tool_calls"]]
        return [part["id"] for part in answer.get("content") or answer["output"]]

    async def answer(self, server, **fields):
        answered = await server.http.post(self.path, json={**self.body, **fields})
        assert answered.status_code == 200, answered.text
        return answered.json()

    def sent_back(self, answer: Json) -> Json:
        """Fields that go on with a conversation after this answer."""
        if "output" in answer:
            return {"input": [*USER, *answer["output"], *USER]}
        said = (
            answer["choices"][0]["message"]
            if "choices" in answer
            else {key: answer[key] for key in ("role", "content")}
        )
        return {"messages": [*USER, said, *USER]}

    async def events(self, server, **fields):
        return events_in((await server.http.post(self.path, json={**self.body, **fields, "stream": True})).text)

    async def refusal(self, server, status=400, **fields):
        """What is told of a request that is refused."""
        answered = await server.http.post(self.path, json={**self.body, **fields})
        assert answered.status_code == status, answered.text
        return answered.json()["error"]["message"]

    async def check_refusals(self, server, rows: Sequence[tuple[Json, str]]) -> None:
        """Each of these fields is refused in these words and counted, and none comes to the engine."""
        before = metric(server, "admission_rejected_total", reason="invalid") or 0
        for fields, said in rows:
            told = await self.refusal(server, **fields)
            assert said in told, told
            assert "; messages" not in told, told
        assert metric(server, "admission_rejected_total", reason="invalid") == before + len(rows)
        assert not server.engine.requests


# ------------------------------------------------------------------------------------------------------ /v1/messages


def _parts_of_a_message(message: Json) -> list[Part]:
    fields = {"thinking": ("reasoning", "thinking"), "text": ("text", "text"), "tool_use": ("call", "input")}
    found = [(kind, block[field]) for block in message["content"] for kind, field in [fields[block["type"]]]]
    return [(kind, json.dumps(said) if kind == "call" and said else said or "") for kind, said in found]


def _count_of_a_message(message: Json) -> Counted:
    usage = message["usage"]
    assert usage["cache_creation_input_tokens"] == 0
    cached, thinking = usage["cache_read_input_tokens"], usage["output_tokens_details"]["thinking_tokens"]
    return Counted(usage["input_tokens"] + cached, cached, usage["output_tokens"], thinking)


def _assembled_message(events: Sequence[Json]) -> Json:
    assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
    assert events[-1]["type"] == "message_stop"
    message, partial = events[0]["message"] | {"content": []}, {}
    assert "input_tokens" in message["usage"]
    borders = [(event["type"], event["index"]) for event in events if "block_st" in event["type"]]
    blocks = range(len(borders) // 2)
    assert borders == [(f"content_block_{kind}", i) for i in blocks for kind in ("start", "stop")]
    for event in events[2:-1]:
        match event["type"]:
            case "content_block_start":
                message["content"].append(dict(event["content_block"]))
            case "content_block_delta":
                block, delta = message["content"][event["index"]], dict(event["delta"])
                kind = delta.pop("type")
                [(field, text)] = delta.items()
                if kind == "input_json_delta":
                    partial[event["index"]] = partial.get(event["index"], "") + text
                else:
                    block[field] += text
            case "message_delta":
                message |= event["delta"] | {"usage": message["usage"] | event["usage"]}
            case other:
                assert other == "content_block_stop"
    for index, text in partial.items():
        try:
            message["content"][index]["input"] = json.loads(text)
        except ValueError:
            assert message["stop_reason"] == "max_tokens"
    return message


# ----------------------------------------------------------------------------------------------------- /v1/responses


def _text_of_item(item: Json) -> str:
    return item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]


def _parts_of_a_response(response: Json) -> list[Part]:
    kinds = {"reasoning": "reasoning", "message": "text", "function_call": "call"}
    return [(kinds[item["type"]], _text_of_item(item)) for item in response["output"]]


def _count_of_a_response(response: Json) -> Counted:
    usage = response["usage"]
    prompt, output = usage["input_tokens"], usage["output_tokens"]
    assert usage["total_tokens"] == prompt + output
    cached, reasoning = usage["input_tokens_details"], usage["output_tokens_details"]
    return Counted(prompt, cached["cached_tokens"], output, reasoning["reasoning_tokens"])


def _assembled_response(events: Sequence[Json]) -> Json:
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    created, in_progress, *_, last = events
    assert [event["type"] for event in (created, in_progress)] == ["response.created", "response.in_progress"]
    assert (created["response"]["status"], created["response"]["output"]) == ("in_progress", [])
    made = last["response"]
    assert last["type"] == f"response.{made['status']}"
    statuses = [item["status"] for item in made["output"]]
    assert set(statuses[:-1]) <= {"completed"}
    assert statuses[-1:] in ([], [made["status"]], ["completed"])
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == made["output"]
    deltas: dict[tuple[str, int, str], str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            name = (event["item_id"], event["output_index"], event["type"])
            deltas[name] = deltas.get(name, "") + event["delta"]
    kinds = {"reasoning": "reasoning_text", "message": "output_text", "function_call": "function_call_arguments"}
    assert deltas == {
        (item["id"], index, f"response.{kinds[item['type']]}.delta"): _text_of_item(item)
        for index, item in enumerate(made["output"])
        if _text_of_item(item)
    }
    return made


# ---------------------------------------------------------------------------------------------- /v1/chat/completions


def _parts_of_a_chat(answer: Json) -> list[Part]:
    message = answer["choices"][0]["message"]
    said = [("reasoning", message.get("reasoning_content")), ("text", message["content"])]
    calls = [("call", call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    return [(kind, text) for kind, text in [*said, *calls] if text is not None]


def _count_of_a_chat(answer: Json) -> Counted:
    usage = answer["usage"]
    prompt, output = usage["prompt_tokens"], usage["completion_tokens"]
    assert usage["total_tokens"] == prompt + output == len(answer["choices"][0]["logprobs"]["content"]) + prompt
    cached, reasoning = usage["prompt_tokens_details"], usage["completion_tokens_details"]
    return Counted(prompt, cached["cached_tokens"], output, reasoning["reasoning_tokens"])


def _assembled_chat(events: Sequence[Json]) -> Json:
    *chunks, last = events
    assert last["choices"] == []
    assert {(chunk["id"], chunk["usage"]) for chunk in chunks} == {(last["id"], None)}
    message, logprobs, order, calls = {"content": "", "refusal": None}, [], [], []
    for [part] in (chunk["choices"] for chunk in chunks):
        delta = part["delta"]
        for name in delta.keys() & {"role", "content", "reasoning_content"}:
            message[name] = message.get(name, "") + delta[name]
            order += [-1] * (name == "reasoning_content")  # content may follow calls
        for call in delta.get("tool_calls", ()):
            order.append(call["index"])
            if call["index"] == len(calls):
                calls.append({"id": call["id"], "type": call["type"], "function": dict(call["function"])})
            else:
                assert call.keys() == {"index", "function"}
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        logprobs += part["logprobs"]["content"] if part["logprobs"] else []
    assert order == sorted(order)
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert set(reasons[:-1]) == {None}
    message |= {"tool_calls": calls, "content": message["content"] or None} if calls else {}
    choice = {"index": 0, "seed": part["seed"], "finish_reason": reasons[-1], "message": message}
    choice["logprobs"] = {"content": logprobs, "refusal": None}
    return last | {"object": "chat.completion", "choices": [choice]}


DIALECTS = {
    "messages": Dialect(
        INTERFACES["messages"],
        {"messages": USER},
        {"name": "weather", "description": "Tells it.", "input_schema": WEATHER},
        {"type": "none"},
        {"output_config": {"format": {"type": "json_schema", "schema": WEATHER}}},
        _parts_of_a_message,
        _count_of_a_message,
        lambda message: message["stop_reason"],
        ("tool_use", "end_turn", "max_tokens"),
        _assembled_message,
    ),
    "responses": Dialect(
        INTERFACES["responses"],
        {"input": "hi"},
        {"type": "function", "strict": False, **FUNCTION},
        "none",
        {"text": {"format": {"type": "json_schema", "name": "w", "schema": WEATHER}}},
        _parts_of_a_response,
        _count_of_a_response,
        lambda response: " ".join([response["status"], *(response["incomplete_details"] or {}).values()]),
        ("completed", "completed", "incomplete max_output_tokens"),
        _assembled_response,
    ),
    "chat": Dialect(
        INTERFACES["chat"],
        {"messages": USER, "seed": 7, "logprobs": True, "stream_options": {"include_usage": True}},
        {"type": "function", "function": FUNCTION},
        "none",
        {"response_format": {"type": "json_schema", "json_schema": {"name": "w", "schema": WEATHER}}},
        _parts_of_a_chat,
        _count_of_a_chat,
        lambda answer: answer["choices"][0]["finish_reason"],
        ("tool_calls", "stop", "length"),
        _assembled_chat,
    ),
}
