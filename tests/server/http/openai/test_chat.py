"""Chat answers with reasoning and calls: whole and streamed they say the same, to OpenAI's own client too."""

from __future__ import annotations

import itertools
import json
from contextlib import asynccontextmanager

import pytest

from pilotfish.v1 import generation_pb2 as pb
from server.chat import ChatTemplate
from server.formats.base import ReasoningMarks, Tool
from server.formats.hermes import HermesFormat
from server.http.openai.answers import AnswerOptions
from server.http.openai.chat import ChatAnswers
from server.http.pieces import CallReader
from tests.engine.text.test_codec import CODEC
from tests.server.fake_engine import FakeEngine, served
from tests.server.fake_grammar import FakeCompiler
from tests.server.http.interfaces import CHAT, TEMPLATE, talking
from tests.server.http.test_long_answers import at_once

HERMES = HermesFormat({}, ReasoningMarks())
TOOLS = [Tool("f"), Tool("g")]
ORDER = {"reasoning_content": -2, "content": -1}  # calls follow, by their numbers
F = '<tool_call>\n{"name": "f", "arguments": {"x": "a"}}\n</tool_call>'
G = '<tool_call>\n{"name": "g", "arguments": {"x": "b"}}\n</tool_call>'
STOP = pb.FINISH_REASON_STOP


def tokens_of(text, size):
    return [text[start : start + size] for start in range(0, len(text), size)]


def finished(index, num_tokens, reason=STOP):
    usage = pb.Usage(
        prompt_tokens=5, completion_tokens=num_tokens, accepted_prediction_tokens=2, rejected_prediction_tokens=1
    )
    return pb.Finished(index=index, finish_reason=reason, usage=usage, seed=index)


def with_logprobs(part, texts, begin=0):
    part.token_ids.extend(range(begin, begin + len(texts)))
    part.text_lengths.extend(map(len, texts))
    part.text = "".join(texts)
    part.logprobs.extend(pb.TokenLogprob(logprob=-float(begin + i)) for i in range(len(texts)))
    return part


def whole_of(outputs, reason=STOP):
    """A response whose outputs have these tokens."""
    made = [
        with_logprobs(pb.Output(index=i, finished=finished(i, len(texts), reason)), texts)
        for i, texts in enumerate(outputs)
    ]
    return pb.GenerateResponse(request_id="r", outputs=made)


async def stream_of(outputs, size, reason=STOP):
    """The same as a stream, with so many tokens in each message; the outputs take turns."""
    is_first = True
    for rounds in itertools.count():
        begin, is_over = rounds * size, True
        for i, texts in enumerate(outputs):
            some = texts[begin : begin + size]
            if some:
                is_over = False
                delta = with_logprobs(pb.TokenDelta(index=i), some, begin)
                yield pb.GenerateStreamResponse(request_id="r" if is_first else "", delta=delta)
                is_first = False
        if is_over:
            break
    for i, texts in enumerate(outputs):
        yield pb.GenerateStreamResponse(finished=finished(i, len(texts), reason))


def answers(options=AnswerOptions(include_usage=True), **about):  # noqa: B008  # it cannot change
    return ChatAnswers("m", CODEC, CallReader(HERMES, TOOLS), options, is_parsed=True, **about)


def put_together(events):
    """The choices that a client makes of a stream."""
    choices = {}
    for event in events:
        for part in event["choices"]:
            choice = choices.setdefault(part["index"], {"message": {}, "logprobs": [], "order": []})
            delta, message = part["delta"], choice["message"]
            for name in ("role", "content", "reasoning_content"):
                if name in delta:
                    message[name] = message.get(name, "") + delta[name]
                    choice["order"] += [] if "role" in delta else [name]
            for call in delta.get("tool_calls", ()):
                choice["order"].append(call["index"])
                calls = message.setdefault("tool_calls", [])
                if call["index"] == len(calls):
                    calls.append({"id": call["id"], "type": call["type"], "function": dict(call["function"])})
                else:
                    assert call.keys() == {"index", "function"}
                    calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
            if part["logprobs"]:
                choice["logprobs"] += part["logprobs"]["content"]
            if part["finish_reason"] is not None:
                assert "finish_reason" not in choice
                choice["finish_reason"] = part["finish_reason"]
    return choices


CASES = {
    "content": ("just text", "stop", {"content": "just text"}),
    "nothing": ("", "stop", {"content": ""}),
    "reasoning": ("<think>\nhm\n</think>\n\nyes", "stop", {"content": "yes", "reasoning_content": "hm"}),
    "a call": (F, "tool_calls", {"content": None, "tool_calls": [("f", {"x": "a"})]}),
    "everything": (
        f"<think>hm</think>I call.\n{F}\n{G}",
        "tool_calls",
        {
            "content": "I call.",
            "reasoning_content": "hm",
            "tool_calls": [("f", {"x": "a"}), ("g", {"x": "b"})],
        },
    ),
}


@pytest.mark.parametrize("name", CASES)
async def test_a_message_has_what_the_text_says(name):
    text, reason, expected = CASES[name]
    answer = await answers().answer([whole_of([tokens_of(text, 3)])])
    [choice] = answer["choices"]
    message = choice["message"]
    calls = [
        (call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message.pop("tool_calls", ())
    ]
    assert (message.pop("role"), message.pop("refusal")) == ("assistant", None)
    assert message | ({"tool_calls": calls} if calls else {}) == expected
    assert choice["finish_reason"] == reason


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("width", [1, 3, 50])
@pytest.mark.parametrize("size", [1, 2, 7, 100])
async def test_a_stream_joins_to_the_whole(name, width, size):
    outputs = [tokens_of(CASES[name][0], width), tokens_of("more " + F, 2)]
    whole = at_once(await answers().answer([whole_of(outputs)]))
    events = [at_once(event) async for some in answers().events(stream_of(outputs, size)) for event in some]
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == whole["usage"]
    joined = put_together(events)
    for choice in whole["choices"]:
        mine = joined[choice["index"]]
        message = {name: value for name, value in choice["message"].items() if name != "refusal"}
        message["content"] = message["content"] or ""
        assert mine["message"] == message
        assert mine["finish_reason"] == choice["finish_reason"]
        assert mine["logprobs"] == (choice["logprobs"] or {"content": []})["content"]
        assert mine["order"] == sorted(mine["order"], key=lambda part: ORDER.get(part, part))


async def test_a_message_of_which_nothing_is_certain_gives_no_chunk_but_its_logprobs():
    texts = ["<tool_", "call", ">"]
    events = [some async for some in answers().events(stream_of([texts], 1))]
    first, second, third, *_ = events
    assert [event["choices"][0]["delta"] for event in first] == [{"role": "assistant", "content": ""}, {}]
    assert [len(some) for some in (second, third)] == [1, 1]

    async def without_logprobs():
        async for message in stream_of([texts], 1):
            message.delta.ClearField("logprobs") if message.HasField("delta") else None
            yield message

    assert [len(some) async for some in answers().events(without_logprobs())] == [1, 0, 0, 2, 1]


async def test_a_call_that_was_forced_or_cut_is_no_reason_to_stop():
    for about, reason, expected in (({"is_forced": True}, STOP, "stop"), ({}, pb.FINISH_REASON_LENGTH, "length")):
        response = whole_of([tokens_of(F, 4)], reason)
        whole = await answers(**about).answer([response])
        stream = [e async for some in answers(**about).events(stream_of([tokens_of(F, 4)], 2, reason)) for e in some]
        assert whole["choices"][0]["message"]["tool_calls"]
        assert whole["choices"][0]["finish_reason"] == put_together(stream)[0]["finish_reason"] == expected


async def test_every_call_of_every_output_has_its_own_id():
    answer = await answers().answer([whole_of([tokens_of(F + G, 5)] * 3)])
    ids = [call["id"] for choice in answer["choices"] for call in choice["message"]["tool_calls"]]
    assert len(set(ids)) == len(ids) == 6


async def test_reasoning_and_predicted_tokens_are_counted():
    outputs = [["<think>", "a", "b", "</think>", "c"], ["d"], ["<think>", "e"]]
    usage = (await answers().answer([whole_of(outputs)]))["usage"]
    assert usage["completion_tokens_details"] == {
        "reasoning_tokens": 4,
        "accepted_prediction_tokens": 6,
        "rejected_prediction_tokens": 3,
    }
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (5, 8)


# ------------------------------------------------------------------------------------------------------ over a port


@asynccontextmanager
async def speaking(text, chat_format=HERMES, template=TEMPLATE):
    """A server whose model always says `text`, and stops at `§`."""
    engine = FakeEngine(text=f"{text}§")
    load = lambda *_: served(  # noqa: E731
        engine, chat=ChatTemplate(template, {}), compile_grammar=FakeCompiler(), format=chat_format
    )
    async with talking(engine, load=load) as server:
        yield server


ASKED = CHAT | {
    "stop": "§",
    "max_tokens": 500,
    "tools": [{"type": "function", "function": {"name": name}} for name in ("f", "g")],
}


async def test_openais_client_puts_a_stream_together_as_the_whole():
    async with speaking(f"<think>hm</think>I call.\n{F}\n{G}") as server:
        whole = await server.client.chat.completions.create(**ASKED)
        [choice] = whole.choices
        assert (choice.message.content, choice.message.reasoning_content) == ("I call.", "hm")
        assert [(c.function.name, c.function.arguments) for c in choice.message.tool_calls] == [
            ("f", '{"x": "a"}'),
            ("g", '{"x": "b"}'),
        ]
        assert choice.finish_reason == "tool_calls"
        assert whole.usage.completion_tokens_details.reasoning_tokens > 2
        async with server.client.chat.completions.stream(**ASKED, stream_options={"include_usage": True}) as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_completion()
        again = final.choices[0].message
        assert (again.content, again.reasoning_content) == ("I call.", "hm")
        assert [call.function.arguments for call in again.tool_calls] == ['{"x": "a"}', '{"x": "b"}']
        assert final.choices[0].finish_reason == "tool_calls"
        assert final.usage.completion_tokens_details == whole.usage.completion_tokens_details


async def test_a_prompt_that_ends_in_the_reasoning():
    async with speaking("hm</think>yes", template=TEMPLATE + "<think>\n") as server:
        asked = CHAT | {"stop": "§"}
        whole = await server.client.chat.completions.create(**asked)
        assert (whole.choices[0].message.content, whole.choices[0].message.reasoning_content) == ("yes", "hm")
        events = [e async for e in await server.client.chat.completions.create(**asked, stream=True)]
        deltas = [event.choices[0].delta for event in events]
        assert "".join(delta.content or "" for delta in deltas) == "yes"
        assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == "hm"


async def test_without_tools_a_call_is_content():
    async with speaking(F, HermesFormat()) as server:
        for fields in ({"tools": []}, {"tool_choice": "none"}):
            done = await server.client.chat.completions.create(**ASKED | fields)
            assert done.choices[0].message.content == F
            assert done.choices[0].message.tool_calls is None
            assert done.choices[0].finish_reason == "stop"


async def test_a_stream_that_is_read_has_no_ids():
    for chat_format, fields, is_refused in (
        (HERMES, {"tools": []}, True),
        (HermesFormat(), {}, True),
        (HermesFormat(), {"tools": []}, False),
        (HermesFormat(), {"tool_choice": "none"}, False),
    ):
        async with speaking("a", chat_format) as server:
            body = ASKED | {"stream": True, "event_ids": True} | fields
            answer = await server.http.post("/v1/chat/completions", json=body)
            assert (answer.status_code == 400) == is_refused
            assert not is_refused or answer.json()["error"]["param"] == "event_ids"
            header = {"Last-Event-ID": "fa4e-7-0-1:0000000000000000"}
            answer = await server.http.post("/v1/chat/completions", json=body | {"event_ids": False}, headers=header)
            assert (answer.status_code == 400) == is_refused
