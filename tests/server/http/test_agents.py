"""Laws of the routes that agents call: whole and streamed they say the same, with reasoning, a text and calls."""

from __future__ import annotations

import json

import pytest

from pilotfish.server.formats.reasoning import PlainFormat
from pilotfish.server.http.pieces import CallReader
from tests.covering import some
from tests.engine.text.test_codec import CODEC
from tests.server.fake_grammar import FakeCompiler
from tests.server.http.agents import (
    ASKED,
    CALL,
    DIALECTS,
    PARTS,
    PLAN,
    REASONING,
    SAID,
    WEATHER,
    prompt_of,
    say,
    talking,
    without_ids,
)
from tests.server.http.interfaces import on_the_shared_server
from tests.serving import until

pytestmark = on_the_shared_server
each = pytest.mark.parametrize("about", DIALECTS.values(), ids=DIALECTS)


@each
async def test_an_answer_has_reasoning_a_text_and_a_call(planning, about):
    made = await about.answer(planning, tools=[about.tool])
    assert about.parts(made) == PARTS
    assert (about.why(made), made["model"]) == (about.ends[0], "fake")
    [asked] = planning.engine.requests
    assert asked.sampling.temperature == 1.0
    counted = about.counted(made)
    assert (counted.prompt, counted.cached) == (len(asked.token_ids), 1)
    assert len(REASONING) < counted.reasoning < counted.output
    assert prompt_of(planning).startswith('[{"name": "weather", "description": "Tells it.", "parameters": {')


@pytest.mark.parametrize("burst", [1, 300])
@each
async def test_a_stream_has_the_parts_of_the_whole_answer(saying, about, burst):
    for text in (PLAN, f"{CALL}\n{CALL}", ""):
        say(saying, text, burst)
        whole = await about.answer(saying, tools=[about.tool])
        events = await about.events(saying, tools=[about.tool])
        assert without_ids(about.assembled(events)) == without_ids(whole)
        assert burst == 1 or len(events) < 30, "one of each kind in a round"


STOPS = [  # of `PLAN`: a stop string, and the parts of the answer with it; only what is in the text cuts it
    *((stop, PARTS) for stop in ("see", "ü", "?\n</th", "think>\n", "\n\nI", "\n\n", "<", "tool_call", "Oslo", "}")),
    ("look", [PARTS[0], ("text", "I ")]),
    (".", [PARTS[0], ("text", SAID[:-1])]),
]


@pytest.mark.parametrize("burst", some([1, 5, 300], [5]))
@each
async def test_stop_strings_are_looked_for_in_the_text_alone(saying, about, burst):
    say(saying, PLAN, burst)
    for stop, parts in STOPS:
        whole = await about.answer(saying, tools=[about.tool], stop=[stop])
        assert about.parts(whole) == parts, stop
        events = await about.events(saying, tools=[about.tool], stop=[stop])
        assert without_ids(about.assembled(events)) == without_ids(whole), stop


async def test_stop_strings_of_other_doors_are_looked_for_in_the_whole_text(planning):
    for stop, text in {"see": "<think>\nLet me ", "Oslo": PLAN[: PLAN.index("Oslo")]}.items():
        asked = {"prompt": "a", "max_tokens": 300, "stop": stop}
        answer = await planning.http.post("/v1/completions", json=asked)
        assert answer.json()["choices"][0]["text"] == text


@each
async def test_a_stream_of_these_routes_cannot_be_continued(saying, about):
    header = {"last-event-id": "fa4e-7-0-1:0000000000000000"}
    for asked in ({}, {"stream": True}):
        answer = await saying.http.post(about.path, json=about.body | asked, headers=header)
        assert answer.status_code == 400
        assert "Last-Event-ID " in answer.json()["error"]["message"]
    assert not saying.engine.requests


# One token less than these beginnings of `PLAN` have: half a mark, half a letter, and half of each kind of part.
CUTS = ("<th", "<think>\n", "Let", "ü", "</th", "</think>\n", "I l", "<tool_", '"na', "weath", "Os", "1, 2", "</tool")


@each
async def test_a_truncated_answer_is_marked_and_keeps_its_text(saying, about):
    say(saying, PLAN, burst=50)
    for mark in CUTS:
        cut = len(CODEC.encode(PLAN[: PLAN.index(mark) + len(mark)])) - 1
        fields = {"tools": [about.tool], about.interface.limit: cut}
        whole = await about.answer(saying, **fields)
        assert without_ids(about.assembled(await about.events(saying, **fields))) == without_ids(whole)
        assert (about.why(whole), about.counted(whole).output) == (about.ends[2], cut)
        assert all(text.rstrip("\ufffd") in PLAN for _, text in about.parts(whole)), "half a mark is text"


BROKEN = (
    CALL.replace("Oslo", "Os\nlo\\q"),  # is repaired
    CALL.replace('"Oslo"', '"Oslo'),
    CALL.replace("}}", "}").replace("[1, 2]", "[1, 2"),
    CALL.replace("2", "NaN"),
    CALL.replace('": {', '" {'),
)


@each
async def test_broken_and_cut_calls_are_no_calls_and_take_nothing_with_them(saying, about):
    for text in [f"{SAID}\n{CALL}\n{broken}\n{CALL}\nSo." for broken in BROKEN]:
        say(saying, text, burst=50)
        num_tokens = len(saying.engine.script)
        for limit in (num_tokens, num_tokens // 2, num_tokens // 3, num_tokens - 9):
            fields = {"tools": [about.tool], about.interface.limit: limit}
            whole = await about.answer(saying, **fields)
            assert without_ids(about.assembled(await about.events(saying, **fields))) == without_ids(whole)
            assert all(isinstance(json.loads(said), dict) for kind, said in about.parts(whole) if kind == "call")
            texts = "".join(said for kind, said in about.parts(whole) if kind == "text")
            assert texts.startswith(SAID)
            assert texts.count("<tool_call>") == texts.count("</tool_call>")
            if limit == num_tokens:
                assert about.parts(whole).count(PARTS[2]) == 2
                assert texts.endswith("\nSo.")
            await about.answer(saying, **about.sent_back(whole))


@each
async def test_a_required_call_that_is_cut_may_be_sent_back(about):
    choice = {"type": "any"} if about.path == "/v1/messages" else "required"
    async with talking(compile_grammar=lambda _: FakeCompiler.Grammar([CALL])) as server:
        for mark in ('": {', "Os", "[1", "]"):
            cut = len(CODEC.encode(CALL[: CALL.index(mark) + len(mark)]))
            fields = {"tools": [about.tool], "tool_choice": choice, about.interface.limit: cut}
            made = await about.answer(server, **fields)
            assert without_ids(about.assembled(await about.events(server, **fields))) == without_ids(made)
            assert about.why(made) == about.ends[2]
            [(kind, said)] = about.parts(made)
            assert kind == "call"
            assert json.dumps(ASKED).startswith(said)
            await about.answer(server, **about.sent_back(made))
            assert ("INVALID_JSON" in prompt_of(server)) == bool(said)


@each
async def test_every_call_has_an_id_of_its_own(saying, about):
    say(saying, f"{CALL}\n{CALL}")
    made = [await about.answer(saying, tools=[about.tool]) for _ in range(2)]
    assert [about.parts(answer) for answer in made] == [PARTS[2:] * 2] * 2
    ids = [match for answer in made for match in about.call_ids(answer)]
    assert len(set(ids)) == len(ids) == 4


@pytest.mark.parametrize(("name", "limit"), [("messages", 32000), ("responses", 32000), ("responses", None)])
async def test_a_limit_that_is_too_large_or_none_is_the_room_of_the_context(saying, name, limit):
    saying.engine.max_model_len = 500
    await DIALECTS[name].answer(saying, **{DIALECTS[name].interface.limit: limit})
    [request] = saying.engine.requests
    assert request.max_len(500) == 500


@each
async def test_without_a_choice_of_tools_calls_are_text(saying, about):
    say(saying, CALL)
    for fields in ({"tools": [about.tool], "tool_choice": about.no_calls}, {"tools": []}):
        made = await about.answer(saying, **fields)
        assert about.parts(made) == [("text", CALL)]
        assert about.why(made) == about.ends[1]
        assert prompt_of(saying) == "<user>hi<go>"


@each
async def test_text_has_the_structure_that_was_asked_for(about):
    compiler = FakeCompiler()
    async with talking(model_format=PlainFormat(), compile_grammar=compiler) as server:
        made = await about.answer(server, **about.structure)
        assert about.parts(made) == [("text", "{}")]
        assert json.loads(compiler.asked[-1].json_schema) == WEATHER


@each
async def test_an_event_that_cannot_be_encoded_ends_a_stream_with_an_error(saying, about, monkeypatch):
    def broken(self, message):
        raise RuntimeError("a secret")

    monkeypatch.setattr(CallReader, "read", broken)
    end = (await about.events(saying))[-1]
    assert about.interface.error(end)["message"] == "internal error"
    await until(lambda: not saying.app.driver.live())
