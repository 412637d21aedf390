"""Hostile bodies: what is wrong with them is told at a price that does not depend on what is in them."""

from __future__ import annotations

import asyncio
import json
import threading
import tracemalloc
from itertools import count

import pytest

from loadtest.experiments.hostile import CALLS, SIZE
from pilotfish.engine.errors import InvalidRequest
from pilotfish.server.chat import MAX_MESSAGES, MAX_TOOLS
from pilotfish.server.http import bodies, routes
from pilotfish.server.http.bodies import MAX_DIGITS, MAX_JSON_PARTS, GenerateBody, read_body
from pilotfish.server.http.errors import violations
from pilotfish.server.http.fields import (
    MAX_BIASES,
    MAX_CHOICES,
    MAX_DEPTH,
    MAX_FIELDS,
    MAX_IDS,
    MAX_PROMPTS,
    MAX_SCHEMA,
    MAX_TEXTS,
)
from pilotfish.server.http.openai.bodies import ChatBody, CompletionBody
from tests.pauses import pauses
from tests.server.http.interfaces import on_the_shared_server, talking
from tests.serving import http_client, serving

MOST_PAUSE = 4.0  # seconds, on a machine that does other things too; it was 45
JSON = {"content-type": "application/json"}
KINDS = {"/generate": GenerateBody, "/v1/completions": CompletionBody, "/v1/chat/completions": ChatBody}


def told(path, data, content_type="application/json"):
    """What is wrong with a body, as texts; none if nothing is."""
    try:
        read = read_body(KINDS[path], data if isinstance(data, bytes) else json.dumps(data).encode(), content_type)
    except InvalidRequest as invalid:
        return [str(violation) for violation in invalid.violations]
    return [str(violation) for violation in read.wrong]


def deep(levels):
    return {"a": deep(levels - 1)} if levels else 1


def turn(**fields):
    return {"role": "user", "content": "a"} | fields


PROMPT = {"prompt": "a"}
TALK = {"messages": [turn()]}
KEYS = {f"k{i}": 1 for i in range(MAX_FIELDS + 1)}
SCHEMA = f"has more than {MAX_SCHEMA} characters and values"
DEEP = f"has more than {MAX_DEPTH} levels"
TEXT, TALKS = "/v1/completions", "/v1/chat/completions"
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": deep(MAX_DEPTH)}}
FORMAT = {"type": "json_schema", "json_schema": {"schema": deep(MAX_DEPTH)}}
BIASES = dict.fromkeys(map(str, range(-1, MAX_BIASES)), "b")


def too_many(field, limit, kind="entries"):
    return f"{field} has {limit + 1} {kind}; the limit is {limit}"


# Every list and object of a body with one entry too many, all of them bad where that is possible; and what is told.
TOO_MANY = [
    ("/generate", KEYS, too_many("body", MAX_FIELDS, "fields")),
    ("/generate", PROMPT | {"stop": [5] * (MAX_TEXTS + 1)}, too_many("stop", MAX_TEXTS)),
    ("/generate", PROMPT | {"guided_choice": [5] * (MAX_CHOICES + 1)}, too_many("guided_choice", MAX_CHOICES)),
    ("/generate", PROMPT | {"logit_bias": BIASES}, too_many("logit_bias", MAX_BIASES)),
    ("/generate", PROMPT | {"speculation": KEYS}, too_many("speculation", MAX_FIELDS, "fields")),
    ("/generate", PROMPT | {"guided_json": {"a": [0] * MAX_SCHEMA}}, f"guided_json {SCHEMA}"),
    ("/generate", PROMPT | {"guided_json": {"a": "é" * MAX_SCHEMA}}, f"guided_json {SCHEMA}"),
    ("/generate", PROMPT | {"guided_json": {"é" * MAX_SCHEMA: 1}}, f"guided_json {SCHEMA}"),
    ("/generate", PROMPT | {"guided_json": deep(MAX_DEPTH)}, f"guided_json {DEEP}"),
    *[
        (TEXT, PROMPT | {name: [-1] * (MAX_IDS + 1)}, too_many(name, MAX_IDS))
        for name in ("prompt", "stop_token_ids", "allowed_token_ids", "banned_token_ids")
    ],
    (TEXT, PROMPT | {"response_format": FORMAT}, f"response_format.json_schema.schema {DEEP}"),
    (TALKS, {"messages": [{}] * (MAX_MESSAGES + 1)}, too_many("messages", MAX_MESSAGES)),
    (TALKS, {"messages": [KEYS]}, too_many("messages[0]", MAX_FIELDS, "fields")),
    (TALKS, {"messages": [turn(content=[{}] * (MAX_TEXTS + 1))]}, too_many("messages[0].content", MAX_TEXTS)),
    (TEXT, {"prompt": [[]] * (MAX_PROMPTS + 1)}, too_many("prompt", MAX_PROMPTS)),
    (TEXT, {"prompt": [[-1] * (MAX_IDS + 1)]}, too_many("prompt[0]", MAX_IDS)),
    (TALKS, TALK | {"tools": [{}] * (MAX_TOOLS + 1)}, too_many("tools", MAX_TOOLS)),
    (TALKS, {"messages": [turn(tool_calls=[{}] * (MAX_TOOLS + 1))]}, too_many("messages[0].tool_calls", MAX_TOOLS)),
    (TALKS, TALK | {"tools": [FUNCTION]}, f"tools[0].function.parameters {DEEP}"),
    (TALKS, TALK | {"chat_template_kwargs": deep(MAX_DEPTH)}, f"chat_template_kwargs {DEEP}"),
    (
        "/generate",
        PROMPT | {"structured_outputs": {"choice": [5] * (MAX_CHOICES + 1)}},
        too_many("structured_outputs.choice", MAX_CHOICES),
    ),
    (
        "/generate",
        PROMPT | {"prediction": {"type": "content", "content": [{}] * (MAX_TEXTS + 1)}},
        too_many("prediction.content", MAX_TEXTS),
    ),
]


@pytest.mark.parametrize(("path", "body", "said"), TOO_MANY, ids=[said.split(" ")[0] for _, _, said in TOO_MANY])
def test_lists_and_objects_are_counted_before_their_entries_are_looked_at(path, body, said, monkeypatch):
    monkeypatch.setattr(bodies, "read_json", lambda *_: body)  # to read a million numbers takes a second
    found = told(path, b"")
    assert any(text.startswith(said) for text in found), found
    assert all("input should be a valid string" in text for text in found if not text.startswith(said))
    assert len(found) <= 2  # the field is not the other type of its union either


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", PROMPT | {"stop": ["x"] * MAX_TEXTS}),
        ("/generate", PROMPT | {"logit_bias": dict.fromkeys(map(str, range(MAX_BIASES)), 1)}),
        ("/generate", PROMPT | {"guided_json": deep(MAX_DEPTH - 1)}),
        (TEXT, {"prompt": [1] * MAX_IDS}),
        (TALKS, {"messages": [turn()] * MAX_MESSAGES}),
        (TALKS, {"messages": [turn(content=[{"type": "text", "text": "a"}] * MAX_TEXTS)]}),
    ],
    ids=["texts", "biases", "depth", "ids", "messages", "parts"],
)
def test_as_many_as_the_limit_are_read(path, body, monkeypatch):
    monkeypatch.setattr(bodies, "read_json", lambda *_: body)
    assert told(path, b"") == []


def test_the_first_bad_entry_of_a_list_ends_its_check_and_a_hundred_that_of_an_object():
    for path, body, said in (
        ("/generate", PROMPT | {"stop": ["x", *[5] * 500]}, "stop[1] is 5; input should be a valid string"),
        ("/generate", PROMPT | {"stop_token_ids": [-1] * 500}, "stop_token_ids[0] is -1;"),
        (TALKS, {"messages": [{}] * 500}, "messages[0].role"),
    ):
        [found] = told(path, body)
        assert found.startswith(said)
    assert len(told("/generate", PROMPT | {"logit_bias": {f"a{i}": "b" for i in range(900)}})) == 100


@pytest.mark.parametrize("element", ["{}", pytest.param("[" * 500 + "]" * 500, marks=pytest.mark.slow)])
def test_a_body_of_too_many_parts_is_refused_before_they_are_made(element):
    data = ('{"prompt":[' + ",".join([element] * (SIZE // (len(element) + 1))) + "]}").encode()
    tracemalloc.start()
    try:
        found = told("/v1/completions", data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found == [f"body has more than {MAX_JSON_PARTS} strings, lists and objects"]
    assert peak < 3 * SIZE


def test_what_is_within_a_text_is_no_part():
    assert told("/generate", {"prompt": '[{"\\' * MAX_JSON_PARTS}) == []


def test_only_the_reported_part_of_a_huge_value_is_formatted():
    written = count()

    class Noted(int):
        def __repr__(self):
            return str(next(written))

    many = [Noted()] * 10**6
    for value in (many, [[many]], {"a": many}, dict(enumerate(many)), ["a" * 10**6] * 3):
        [violation] = violations([{"type": "extra_forbidden", "loc": ("x",), "input": value}])
        assert len(violation.problem) < 120
    assert next(written) < 500
    [violation] = violations([{"type": "int_type", "loc": ("k" * 10**6,), "input": 1, "msg": "No"}])
    assert len(violation.field) <= 300


# ------------------------------------------------------------------------------------- bytes that are no JSON of ours


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b'{"prompt":"\xff"}', "body is not UTF-8: the byte 0xff at 11"),
        (b"[" * 5000, "body is not valid JSON: it is nested too deeply"),
        (b'{"seed":' + b"9" * (MAX_DIGITS + 1) + b"}", f"body is not valid JSON: a number has {MAX_DIGITS + 1} digits"),
        (b'{"prompt":', "body is not valid JSON: Expecting value at 10"),
        (b"", "body is not valid JSON: Expecting value at 0"),
        (b'{"prompt":"' + b'\\"' * (SIZE // 2), "body is not valid JSON: Unterminated string"),
    ],
    ids=["no UTF-8", "too deep", "long number", "no JSON", "nothing", "no end"],
)
def test_each_kind_of_unreadable_body_has_its_own_error(data, said):
    [found] = told("/generate", data)
    assert found.startswith(said)


def test_a_mark_of_the_byte_order_is_no_mistake():
    assert told("/generate", b'\xef\xbb\xbf{"prompt":"a"}') == []


@pytest.mark.parametrize("kind", ["", "text/plain", "application/x-www-form-urlencoded", "nonsense", "(" * 9000])
def test_what_a_page_can_send_to_another_site_without_asking_is_refused(kind):
    [found] = told("/generate", PROMPT, kind)
    assert "expected application/json" in found


HALF = [
    ("/generate", rb'"prompt":"a","\ud800":1'),
    *[
        ("/generate", rb'"prompt":"a","%s":{"\ud800":1}' % field)
        for field in (b"logit_bias", b"guided_json", b"speculation")
    ],
    ("/generate", rb'"prompt":"a","guided_json":{"a":["\ud800"]}'),
    ("/generate", rb'"prompt":"a","guided_json":{"a":[{"b":{"\ud800":1}}]}'),
    (TEXT, rb'"prompt":"a","response_format":{"type":"json_schema","json_schema":{"schema":{"\ud800":1}}}'),
    (TALKS, rb'"messages":[{"role":"user","content":"a","\ud800":1}]'),
    (TALKS, rb'"messages":[{"role":"a","content":[{"type":"text","text":"a","\ud800":1}]}]'),
]


@pytest.mark.parametrize(("path", "fields"), HALF, ids=range(len(HALF)))
@on_the_shared_server
async def test_half_a_surrogate_pair_in_a_key_is_a_mistake_that_is_named(server, path, fields):
    answer = await server.http.post(path, content=b"{%s}" % fields, headers=JSON)
    assert answer.status_code == 400
    assert r"'\ud800'" in answer.json()["error"]["message"]


def test_a_field_may_be_named_like_a_type():
    assert told("/generate", PROMPT | {"str": 1}) == ["str is 1; this field is not supported"]


# ---------------------------------------------------------------------------------------------------- beside the loop


async def test_large_bodies_are_read_beside_the_loop_one_at_a_time_and_small_ones_on_it():
    seen, open_now, most = [], [], []

    def watched(kind, data, about):
        open_now.append(data)
        most.append(len(open_now))
        seen.append((len(data) > 2048, threading.current_thread() is threading.main_thread()))
        try:
            return read_body(kind, data, about)
        finally:
            open_now.remove(data)

    async with talking() as server:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(routes, "read_body", watched)
            for size in (10, 300_000):
                asked = [server.http.post("/generate", json={"prompt": "a" * size, "stop": 5}) for _ in range(4)]
                assert {answer.status_code for answer in await asyncio.gather(*asked)} == {400}
    assert set(seen) == {(False, True), (True, False)}
    assert max(most) == 1


HTTP = [name for name, call in CALLS.items() if call.is_http]
CHEAP = ["HTTP, many parts", "HTTP, unknown keys", "HTTP, deep objects", "HTTP, a long number", "HTTP, no UTF-8"]
DEAR = [name for name in HTTP if name not in (*CHEAP, "HTTP, allowed ids", "HTTP, banned ids", "HTTP, stop ids")]


@pytest.mark.parametrize("names", [CHEAP, pytest.param(DEAR, marks=pytest.mark.slow)], ids=["cheap", "dear"])
async def test_the_largest_bodies_neither_stall_the_loop_nor_end_as_faults_of_the_server(names):
    async with serving() as server, http_client(server) as http:
        for name in names:
            async with pauses() as seen:
                answer = await http.post(CALLS[name].path, content=CALLS[name].make(), headers=JSON)
            assert answer.status_code in (200, 400), name
            assert answer.status_code == 200 or len(answer.json()["error"]["message"]) <= 4000, name
            assert seen.longest < MOST_PAUSE, name


async def test_the_description_of_the_routes_refers_to_what_is_there():
    async with serving() as server, http_client(server) as http:
        document = (await http.get("/openapi.json")).json()
        assert (await http.get("/docs")).status_code == (await http.get("/redoc")).status_code == 404
    for path in (TEXT, TALKS):
        reference = document["paths"][f"{path}/render"]["post"]["requestBody"]["$ref"]
        assert reference == f"#/paths/{path.replace('/', '~1')}/post/requestBody"
    bodies = [document["paths"][path]["post"]["requestBody"] for path in KINDS]
    schemas = [body["content"]["application/json"]["schema"] for body in bodies]
    assert all("stop" in schema["properties"] for schema in schemas)
    found = [text.split('"')[0] for text in json.dumps(document).split('"$ref": "#/')[1:]]
    assert found
    for reference in found:
        place = document
        for part in reference.split("/"):
            place = place[part.replace("~1", "/")]
        assert place.get("type") == "object" or "enum" in place or "application/json" in place["content"]
