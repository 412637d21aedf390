"""The HTTP routes: `/generate`, and OpenAI's two as their official client calls them, over a real port."""

from __future__ import annotations

import math
import socket
import time
from dataclasses import replace

import pytest

from pilotfish.engine.types import Logprob
from tests.engine.text.test_codec import CODEC, END
from tests.server import fake_engine
from tests.server.fake_engine import SHIFT, TEXT, FakeEngine, logprob_of, served
from tests.server.http.interfaces import CHAT, events_in, on_the_shared_server, talking, text_of

pytestmark = on_the_shared_server

# -------------------------------------------------------------------------------------------------------- /generate


async def test_generate_returns_text_and_speed(server):
    body = {"prompt": "ab", "max_new_tokens": 9, "k_draft": 3, "stop": "quick", "cache_salt": "me"}
    answer = await server.http.post("/generate", json=body)
    assert answer.status_code == 200
    found = answer.json()
    assert found["generated_text"] == "the "
    assert found["tokens_per_second"] > 0
    assert found["latency_ms"] > 0
    assert found["avg_tokens_per_jump"] == 3.0
    await server.http.post("/generate", json={"prompt": "ab", "k_draft": 0, "temperature": 0.5})
    first, second = server.engine.requests
    assert (first.sampling.max_tokens, first.sampling.temperature, first.cache_salt) == (9, 0.0, "me")
    assert (first.speculation.num_draft_tokens, first.speculation.mode) == (3, "fixed")
    assert (second.speculation.mode, second.sampling.temperature) == ("off", 0.5)


@pytest.mark.parametrize("fields", [{"max_new_tokens": 31}, {"stop": "brown"}, {"max_new_tokens": 5, "stop": ["zzz"]}])
async def test_a_stream_of_generate_marks_accepted_drafts(fields):
    async with talking(FakeEngine(text="€ur° the brown ")) as server:
        whole = (await server.http.post("/generate", json={"prompt": "ab"} | fields)).json()
        *pieces, end = events_in(
            (await server.http.post("/generate", json={"prompt": "ab", "stream": True} | fields)).text
        )
        tokens = [token for piece in pieces for token in piece["tokens"]]
        assert [token["id"] for token in tokens] == list(server.engine.expected(len(tokens)))
        assert [token["from_draft"] for token in tokens[:-1]] == [i % 3 != 2 for i in range(len(tokens) - 1)]
        for piece in pieces:
            assert piece["text"].startswith("".join(token["text"] for token in piece["tokens"]))
        assert "".join(piece["text"] for piece in pieces) == whole["generated_text"]
        assert end.keys() == whole.keys() - {"generated_text"}
        changing = {"latency_ms", "time_to_first_token_ms", "tokens_per_second", "seed"}
        assert all(end[name] == whole[name] for name in end.keys() - changing)
        assert (end["completion_tokens"], end["drafted"], end["accepted"]) == (len(tokens), 8, 4)
        assert 0 < end["time_to_first_token_ms"] <= end["latency_ms"]


# ------------------------------------------------------------------------------------------------------ completions


async def test_a_completion_with_everything(server):
    done = await server.client.completions.create(
        model="fake",
        prompt="a b",
        max_tokens=20,
        n=2,
        stop=["quick", "row"],
        seed=5,
        logprobs=2,
        logit_bias={"3": -1},
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        user="someone",
        extra_body={
            "top_k": 7,
            "min_p": 0.1,
            "repetition_penalty": 1.2,
            "min_tokens": 1,
            "stop_token_ids": [9],
            "ignore_eos": True,
            "allowed_token_ids": [1, 2],
            "banned_token_ids": [2],
            "cache_salt": "tenant",
            "speculation": {"mode": "fixed", "num_draft_tokens": 2, "proposer": "ngram"},
        },
    )
    [asked] = server.engine.requests
    sampling = asked.sampling
    assert (sampling.temperature, sampling.top_k, sampling.min_p, sampling.seed) == (1.0, 7, 0.1, 5)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.2, 0.5, -0.5)
    assert (sampling.logit_bias, sampling.min_tokens, sampling.stop_token_ids) == ({3: -1.0}, 1, (9,))
    assert (sampling.allowed_token_ids, sampling.banned_token_ids, sampling.ignore_eos) == ((1, 2), (2,), True)
    assert (asked.cache_salt, asked.speculation.num_draft_tokens) == ("tenant", 2)
    assert [choice.text for choice in done.choices] == [TEXT[:4], TEXT[SHIFT:4]]
    assert [choice.finish_reason for choice in done.choices] == ["stop", "stop"]
    assert [choice.seed for choice in done.choices] == [5, 6]
    assert (done.model, done.object) == ("fake", "text_completion")
    logprobs = done.choices[0].logprobs
    ids = server.engine.expected(len(logprobs.tokens))
    assert "".join(logprobs.tokens) == "the quick"
    assert logprobs.token_logprobs == [logprob_of(token, 0).logprob for token in ids]
    assert [len(top) for top in logprobs.top_logprobs] == [2] * len(ids)
    assert logprobs.text_offset == [0, 1, 2, 3, 4, 4, 4, 4, 4]
    assert done.usage.completion_tokens == sum(len(choice.logprobs.tokens) for choice in done.choices)
    assert done.usage.prompt_tokens_details.cached_tokens == 1
    assert done.usage.total_tokens == done.usage.prompt_tokens + done.usage.completion_tokens


# ------------------------------------------------------------------------------------------------------------- chat


async def test_log_probabilities_of_a_chat_of_two_outputs(server):
    asked = {"max_completion_tokens": 6, "logprobs": True, "top_logprobs": 1, "n": 2}
    whole = await server.client.chat.completions.create(**CHAT | asked)
    events = [event async for event in await server.client.chat.completions.create(**CHAT | asked, stream=True)]
    for choice in whole.choices:
        text, found = text_of(server.engine, 6, choice.index), choice.logprobs.content
        ids = server.engine.expected(6, choice.index)
        assert (choice.message.content, "".join(entry.token for entry in found)) == (text, text)
        assert [entry.logprob for entry in found] == [logprob_of(token, 0).logprob for token in ids]
        assert [len(entry.top_logprobs) for entry in found] == [1] * 6
        assert bytes(found[0].bytes) == text[:1].encode()
        mine = [event.choices[0] for event in events if event.choices[0].index == choice.index]
        assert [entry for part in mine if part.logprobs for entry in part.logprobs.content] == found


SPLIT = "a €5 ü🎉"  # most of its characters are several tokens
ENDED = CHAT | {"logprobs": True, "top_logprobs": 3, "max_tokens": 100}


async def test_the_bytes_of_an_answers_tokens_join_to_its_text():
    async with talking(FakeEngine(text=SPLIT + END)) as server:
        asked = ENDED | {"extra_body": {"stop_token_ids": list(server.engine.script[-1:])}}
        whole = await server.client.chat.completions.create(**asked)
        events = [event.choices[0] async for event in await server.client.chat.completions.create(**asked, stream=True)]
        [choice], found = whole.choices, whole.choices[0].logprobs.content
        assert [entry for event in events if event.logprobs for entry in event.logprobs.content] == found
        assert b"".join(bytes(entry.bytes or ()) for entry in found).decode() == choice.message.content == SPLIT
        assert [entry.token for entry in found if entry.bytes is None] == [END]
        parts = [entry for entry in found if entry.token.startswith("token_id:")]
        assert len(parts) > 4
        assert all(entry.bytes for entry in parts)
        assert all(rival.bytes for entry in found for rival in entry.top_logprobs[1:])


# ----------------------------------------------------------------------------------------------------------- errors


async def test_what_asks_for_nothing_is_taken(server):
    nothing = {"user": "x", "metadata": {"a": "b"}, "tools": [], "stop": None, "logit_bias": None, "store": False}
    assert (await server.http.post("/v1/chat/completions", json=CHAT | nothing)).status_code == 200
    harmless = {"prompt": "ab", "echo": False, "best_of": 1, "suffix": "", "use_beam_search": False}
    assert (await server.http.post("/v1/completions", json=harmless)).status_code == 200


async def test_the_model_is_listed_and_found_by_its_name():
    async with talking() as server:
        [listed] = (await server.http.get("/v1/models")).json()["data"]
        found = await server.client.models.retrieve("fake")
        assert found.to_dict() == listed
        assert (listed["id"], listed["object"], listed["max_model_len"]) == ("fake", "model", 4096)
        assert listed["created"] <= time.time() < listed["created"] + 3600
        for name in ("other", "who/other", "fake/"):
            missing = await server.http.get(f"/v1/models/{name}")
            assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
            assert repr(name) in missing.json()["error"]["message"]
    load = lambda *_: replace(served(FakeEngine()), name="who/it")  # noqa: E731
    async with talking(load=load) as server:
        assert (await server.http.get("/v1/models/who/it")).json()["id"] == "who/it"


async def test_no_answer_waits_for_the_callers_acknowledgement():
    """Nagle's algorithm would hold back what follows the headers for 40 ms."""
    async with talking() as server:
        await server.http.get("/health")
        (connection,) = server.app._http.server_state.connections
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_a_law_that_makes_a_token_impossible_is_still_json():
    async with talking() as server:
        server.engine.script = CODEC.encode("a")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fake_engine, "logprob_of", lambda token, top: Logprob(-math.inf))
            done = await server.client.completions.create(model="fake", prompt="a", max_tokens=2, logprobs=0)
        assert done.choices[0].logprobs.token_logprobs == [-9999.0, -9999.0]
