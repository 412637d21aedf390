"""`/tokenize` and `/detokenize`: the tokens that the same request is run with, and back; and `/version`."""

from __future__ import annotations

import pytest

from pilotfish.server import version
from tests.engine.text.test_codec import CODEC, END
from tests.server.http.interfaces import on_the_shared_server, talking
from tests.server.test_security import ALICE
from tests.serving import http_client, serving, serving_embedded

pytestmark = on_the_shared_server
TURNS = [{"role": "user", "content": "the quick"}, {"role": "assistant", "content": "fox"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


async def post(server, path, body, **headers):
    answer = await server.http.post(path, json=body, headers=headers)
    return answer.status_code, answer.json()


@pytest.mark.parametrize("body", [{"prompt": "the quick €5"}, {"messages": TURNS}, {"messages": TURNS[:1], "n": 2}])
async def test_the_tokens_are_those_of_the_same_request(server, body):
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    await server.http.post(path, json=body | {"max_tokens": 1})
    status, found = await post(server, "/tokenize", body | {"model": "fake"})
    tokens = list(server.engine.requests[-1].token_ids)
    assert (status, found) == (
        200, {"count": len(tokens), "max_model_len": 4096, "tokens": tokens, "token_strs": None},
    )  # fmt: skip
    assert len(server.engine.requests) == 1
    _, named = await post(server, "/tokenize", body | {"return_token_strs": True})
    assert named["token_strs"] == [CODEC.tokenizer.id_to_token(token) for token in tokens]


async def test_of_a_served_checkpoint_and_back():
    asked = {"messages": TURNS[:1], "tools": [TOOL], "tool_choice": "none", "chat_template_kwargs": {"x": 1}}
    async with serving_embedded(draft=()) as server, http_client(server) as http:
        server.http = http
        sizes = {}
        for opens in (True, False):
            _, found = await post(server, "/tokenize", asked | {"add_generation_prompt": opens})
            sizes[opens] = found["count"]
            assert found["max_model_len"] == server.app.driver.model.engine.facts.limits.max_model_len
            status, back = await post(server, "/detokenize", {"tokens": found["tokens"]})
            assert (status, "the quick" in back["prompt"]) == (200, True)
            again = {"prompt": back["prompt"], "add_special_tokens": False}
            assert (await post(server, "/tokenize", again))[1]["tokens"] == found["tokens"], "marks of turns are text"
        assert sizes[True] > sizes[False]
        _, counted = await post(server, "/v1/messages/count_tokens", {"messages": TURNS[:1]})
        assert counted["input_tokens"] == (await post(server, "/tokenize", {"messages": TURNS[:1]}))[1]["count"]


WRONG = [
    ("/tokenize", {}, 400, "body has neither prompt nor messages"),
    ("/tokenize", {"prompt": "a", "messages": TURNS}, 400, "body has prompt and messages; expected one of them"),
    ("/tokenize", {"prompt": 5}, 400, "prompt is 5"),
    ("/tokenize", {"messages": []}, 400, "messages has 0 messages"),
    ("/tokenize", {"prompt": "a", "nonsense": 1}, 400, "nonsense is 1; this field is not supported"),
    ("/tokenize", {"prompt": "a", "model": "other"}, 404, "'other'"),
    ("/tokenize", {"prompt": "a" * 100_000}, 400, "maximum context length is 4096 tokens"),
    ("/detokenize", {}, 400, "tokens is missing"),
    ("/detokenize", {"tokens": "a"}, 400, "tokens is 'a'"),
    ("/detokenize", {"tokens": [1, 10**6]}, 400, "tokens[1] is 1000000"),
    ("/detokenize", {"tokens": [-1]}, 400, "tokens[0] is -1"),
    ("/detokenize", {"tokens": [1] * 5000}, 400, "tokens has 5000 ids; the limit is 4096"),
    ("/detokenize", {"tokens": [1], "model": "other"}, 404, "'other'"),
]


@pytest.mark.parametrize(("path", "body", "status", "said"), WRONG)
async def test_bad_bodies_are_refused_by_name(server, path, body, status, said):
    found, answer = await post(server, path, body)
    assert (found, said in answer["error"]["message"]) == (status, True), answer


async def test_special_tokens_are_text_and_nothing_is_the_empty_text(server):
    [end] = CODEC.encode(END)
    assert await post(server, "/detokenize", {"tokens": [*CODEC.encode("a"), end]}) == (200, {"prompt": f"a{END}"})
    assert await post(server, "/detokenize", {"tokens": []}) == (200, {"prompt": ""})
    assert (await post(server, "/tokenize", {"prompt": ""}))[1]["tokens"] == []


async def test_they_need_a_token_and_count_as_requests_of_their_caller(tokens):
    async with talking(token_file=tokens, requests_per_second=1.0) as server:
        for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
            assert (await post(server, path, body))[0] == 401
        known = {"authorization": f"Bearer {ALICE}"}
        statuses = [(await post(server, "/tokenize", {"prompt": "a"}, **known))[0] for _ in range(3)]
        assert statuses == [200, 429, 429]
        assert (await server.http.get("/version")).status_code == 401


async def test_without_tokenizer_or_template_the_error_says_so():
    async with serving(codec=None) as server, http_client(server) as http:
        for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
            assert "no tokenizer" in (await http.post(path, json=body)).json()["error"]["message"]
    async with serving() as server, http_client(server) as http:
        answer = await http.post("/tokenize", json={"messages": TURNS})
        assert (answer.status_code, "no chat template" in answer.text) == (400, True)


async def test_the_version(server):
    assert (await server.http.get("/version")).json() == {"version": version()}
