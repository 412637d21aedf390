"""Answers of very many log-probabilities are made in parts: others have turns between. No test measures time."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from pilotfish.engine.types import Logprob, TokenEvent, TopLogprob
from pilotfish.server.http.calls import MAX_AT_ONCE, PIECE, _write_pieces, encoded, list_of
from pilotfish.server.http.openai.answers import ChatAnswers, TextAnswers
from pilotfish.server.http.openai.bodies import ChatBody, CompletionBody
from pilotfish.v1 import generation_pb2 as pb
from tests.engine.text.test_codec import CODEC
from tests.server import fake_engine
from tests.server.fake_engine import FakeEngine, logprob_of
from tests.server.http.interfaces import CHAT, answering, each, ended, talking, whole_of
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


def filled(num_tokens, index=0, start=0, **fields):
    ids = range(start, start + num_tokens)
    return TokenEvent(
        request_id="r",
        index=index,
        token_ids=tuple(i % 200 for i in ids),
        texts=("“a” ",) * num_tokens,
        logprobs=tuple(Logprob(-i / 7, tuple(TopLogprob((i + j) % 300, -j / 3) for j in range(TOP))) for i in ids),
        **fields,
    )


def outputs(num_tokens):
    return [filled(num_tokens, index=i, finished=ended(seed=i)) for i in range(N)]


def text_answers(codec=CODEC):
    return answering(TextAnswers, CompletionBody(prompt="a", n=N), codec)


def chat_answers(codec=CODEC):
    return answering(ChatAnswers, ChatBody(messages=[]), codec)


@pytest.mark.parametrize("length", [0, 1, MAX_AT_ONCE, MAX_AT_ONCE + 1, 3 * MAX_AT_ONCE, 250])
async def test_a_list_in_parts_is_what_one_piece_would_be_and_others_have_turns(length):
    entries, made = [{"a": i / 7, "b": "“"} for i in range(length)], []

    def make(i):
        made.append((seen.count, i))
        return entries[i]

    async with turns() as seen:
        assert encoded(await list_of(length, make)) == encoded(entries)
    assert [i for _, i in made] == list(range(length))
    assert max(Counter(turn for turn, _ in made).values(), default=0) <= MAX_AT_ONCE


@pytest.mark.parametrize("kind", [text_answers, chat_answers])
async def test_a_long_answer_has_what_short_ones_have(kind):
    """Log-probabilities beyond a part, whose lists are encoded in parts, and each output by itself."""
    [found] = (await whole_of(kind(), outputs(250)[:1]))["choices"]
    parts = [await whole_of(kind(), [filled(50, finished=ended(seed=0), start=i)]) for i in range(0, 250, 50)]
    lists = [part["choices"][0]["logprobs"] for part in parts]
    for name in ("content",) if kind is chat_answers else ("tokens", "token_logprobs", "top_logprobs"):
        assert found["logprobs"][name] == [entry for some in lists for entry in some[name]]


@pytest.mark.parametrize("kind", [text_answers, chat_answers])
async def test_others_have_a_turn_after_each_output(kind):
    answers, made = kind(), []
    entry = answers._choice

    async def noted(output):
        made.append(seen.count)
        return await entry(output)

    answers._choice = noted
    async with turns() as seen:
        await answers.answer(outputs(1))
    assert len(set(made)) == N


async def test_an_event_of_very_many_is_sent_in_pieces_and_a_small_one_in_one():
    async def sent(num_tokens):
        pieces, limits = [], Limits()

        async def send(message):
            pieces.append(message["body"])
            assert limits.is_open

        [events] = [events async for events in chat_answers().events(each([filled(num_tokens)]))]
        data = encoded(events[-1])
        await _write_pieces(send, limits, data)
        assert b"".join(pieces) == data
        assert limits.count == len(pieces)
        return pieces

    assert len(await sent(MAX_AT_ONCE // 2)) == 1
    pieces = await sent(1000)
    assert len(pieces) >= 10
    assert max(map(len, pieces)) == PIECE


class Limits:
    """Counts the writes, each of which has a limit of time of its own."""

    count, is_open = 0, False

    def __enter__(self):
        self.count, self.is_open = self.count + 1, True

    def __exit__(self, *_):
        self.is_open = False


async def test_each_token_is_decoded_once_for_an_answer():
    decoded = Counter()

    def bytes_of(token, *, leads):
        decoded[token, leads] += 1
        return CODEC.spelling.bytes_of(token, leads=leads)

    codec = SimpleNamespace(spelling=SimpleNamespace(bytes_of=bytes_of), special_tokens=frozenset())
    await chat_answers(codec).answer(outputs(300))
    assert {token for token, _ in decoded} == set(range(300))
    assert set(decoded.values()) == {1}
