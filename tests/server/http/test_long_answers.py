"""Answers of very many log-probabilities are made in parts: others have turns between. No test measures time."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from engine.types import Logprob, TokenEvent, TopLogprob
from pilotfish.v1 import generation_pb2 as pb
from server.http.calls import MAX_AT_ONCE, MIN_PIECE, LongList, each, event_parts, in_turns, json_parts
from server.http.openai.bodies import ChatBody, CompletionBody
from server.http.openai.chat import ChatAnswers
from server.http.openai.text import TextAnswers
from tests.engine.text.test_codec import CODEC
from tests.server import fake_engine
from tests.server.fake_engine import FakeEngine, logprob_of
from tests.server.http.interfaces import CHAT, answering, ended, talking
from tests.server.test_generate import request

N, NUM_TOKENS, TOP = 3, 150, 20


@asynccontextmanager
async def turns():
    """A count of the turns that another task of the event loop has had."""
    seen = SimpleNamespace(count=0)

    async def take():
        while True:
            seen.count += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(take())
    try:
        yield seen
    finally:
        task.cancel()


# --------------------------------------------------------------------------------------------------------- messages


class Noted:
    """A log-probability that notes when it is converted."""

    def __init__(self, note, of):
        self._note, self._of, self.top = note, of, of.top

    @property
    def logprob(self):
        self._note()
        return self._of.logprob


@pytest.mark.parametrize("front_end", ["http", "grpc"])
async def test_no_turn_of_the_loop_converts_more_than_a_part(front_end, monkeypatch):
    async with talking(FakeEngine(burst=40)) as server, turns() as seen:
        converted = Counter()
        note = lambda: converted.update([seen.count])  # noqa: E731
        monkeypatch.setattr(fake_engine, "logprob_of", lambda token, top: Noted(note, logprob_of(token, top)))
        prompt = 0
        if front_end == "http":
            body = CHAT | {"n": N, "max_tokens": NUM_TOKENS, "logprobs": True, "top_logprobs": 2}
            answer = await server.http.post("/v1/chat/completions", json=body)
            lengths = [len(choice["logprobs"]["content"]) for choice in answer.json()["choices"]]
        else:
            sampling, stopping = pb.SamplingParams(n=N), pb.StoppingParams(max_tokens=NUM_TOKENS)
            output = pb.OutputOptions(logprobs=2, prompt_logprobs=2)
            asked = request(sampling=sampling, stopping=stopping, output=output, prompt="ab " * 150)
            answer = await server.inference.Generate(asked)
            lengths = [len(output.logprobs) for output in answer.outputs]
            prompt = len(answer.prompt_logprobs.logprobs)
            assert prompt > MAX_AT_ONCE
        assert lengths == [NUM_TOKENS] * N
        assert converted.total() == N * NUM_TOKENS + prompt
        assert max(converted.values()) <= MAX_AT_ONCE


# ------------------------------------------------------------------------------------------------------------- JSON


def filled(num_tokens, index=0, **fields):
    return TokenEvent(
        request_id="r",
        index=index,
        token_ids=tuple(i % 200 for i in range(num_tokens)),
        texts=("“a” ",) * num_tokens,
        logprobs=tuple(
            Logprob(-i / 7, tuple(TopLogprob((i + j) % 300, -j / 3) for j in range(TOP))) for i in range(num_tokens)
        ),
        **fields,
    )


def outputs(num_tokens):
    return [filled(num_tokens, index=i, finished=ended(seed=i)) for i in range(N)]


def at_once(value):
    """The same value with all its lists made."""
    if isinstance(value, LongList):
        return at_once(value.make(0, value.length))
    if isinstance(value, dict):
        return {name: at_once(entry) for name, entry in value.items()}
    return [at_once(entry) for entry in value] if isinstance(value, list) else value


def dumped(value):
    return json.dumps(at_once(value), ensure_ascii=False, separators=(",", ":")).encode()


def text_answers(codec=CODEC):
    return answering(TextAnswers, CompletionBody(prompt="a", n=N), codec)


def chat_answers(codec=CODEC):
    return answering(ChatAnswers, ChatBody(messages=[]), codec)


@pytest.mark.parametrize("kind", [text_answers, chat_answers])
@pytest.mark.parametrize("num_tokens", [0, MAX_AT_ONCE // N, MAX_AT_ONCE // N + 1, 101])
async def test_parts_joined_are_what_one_piece_would_be(kind, num_tokens):
    answer = await kind().answer(outputs(num_tokens))
    parts = list(json_parts(answer))
    assert b"".join(parts) == dumped(answer)
    per_token = 1 + TOP if kind is chat_answers else TOP
    assert max(part.count(b'"logprob"') for part in parts) <= MAX_AT_ONCE * per_token
    assert max(part.count(b":") for part in parts) < 4 * MAX_AT_ONCE * (1 + TOP) + 100


@pytest.mark.parametrize("kind", [text_answers, chat_answers])
async def test_each_part_is_made_only_when_it_is_encoded(kind):
    made = []
    answers = kind()
    entry, note = answers._choice, made.append
    answers._choice = lambda output, read: [note(output.index), entry(output, read)][1]
    parts = json_parts(await answers.answer(outputs(250)))
    assert made == []
    for index in range(N):
        while made[-1:] != [index]:
            next(parts)
        assert made == list(range(index + 1))


async def test_many_long_texts_are_not_encoded_at_once():
    texts = ("a" * MIN_PIECE,)
    some = [TokenEvent(request_id="r", index=i, token_ids=(1,), texts=texts, finished=ended()) for i in range(4)]
    for kind in (text_answers, chat_answers):
        answer = await kind().answer(some)
        parts = list(json_parts(answer))
        assert max(map(len, parts)) < 2 * MIN_PIECE
        assert b"".join(parts) == dumped(answer)


async def test_an_event_of_very_many_is_sent_in_pieces_and_a_small_one_in_one():
    async def sent(num_tokens):
        [events] = [events async for events in chat_answers().events(each([filled(num_tokens)]))]
        async with turns() as seen:
            found = [(seen.count, piece) async for piece in in_turns(event_parts(events[-1], "name", "17"))]
        bodies = [body for _, body in found]
        wanted = b"id: 17\nevent: name\ndata: %b\n\n" % dumped(events[-1])
        assert b"".join(bodies) == wanted
        assert len({turn for turn, _ in found}) >= len(found) - 1  # the last may follow without a turn
        return bodies

    assert len(await sent(MAX_AT_ONCE // 2)) == 1
    pieces = await sent(1000)
    assert len(pieces) >= 10
    assert max(map(len, pieces)) < MIN_PIECE + 200 * MAX_AT_ONCE * (1 + TOP)


async def test_each_token_is_decoded_once_for_an_answer():
    decoded = Counter()

    def bytes_of(token, *, leads):
        decoded[token, leads] += 1
        return CODEC.spelling.bytes_of(token, leads=leads)

    codec = SimpleNamespace(spelling=SimpleNamespace(bytes_of=bytes_of), special_tokens=frozenset())
    list(json_parts(await chat_answers(codec).answer(outputs(300))))
    assert {token for token, _ in decoded} == set(range(300))
    assert set(decoded.values()) == {1}
