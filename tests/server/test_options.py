"""What a request may ask for beyond one sampled text: several outputs, log-probabilities, structure, a salt."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from functools import partial

import grpc
import pytest

from pilotfish.engine.types import FinishReason
from pilotfish.server.admission.slow_work import SlowWork
from pilotfish.server.errors import QueueFull
from pilotfish.v1 import generation_pb2 as pb
from tests.server.fake_engine import EOS, TEXT, FakeEngine, logprob_of
from tests.server.fake_grammar import FakeCompiler
from tests.server.test_generate import error_of, refused, request, streamed
from tests.server.test_life import LONG, busy, metric
from tests.serving import serving, until


async def by_index(call):
    """What a stream brought: {index: (text, token ids, logprobs, ends)}, and its messages."""
    messages = [message async for message in call]
    found = defaultdict(lambda: ["", [], [], []])
    for message in messages:
        if message.HasField("finished"):
            found[message.finished.index][3].append(message.finished)
            continue
        output = found[message.delta.index]
        assert not output[3], "a delta after the end of its output"
        output[0] += message.delta.text
        output[1] += message.delta.token_ids
        output[2] += message.delta.logprobs
    return dict(found), messages


def logprobs_of(tokens, top):
    """What the fake says of these tokens, as messages."""
    nouns = [logprob_of(token, top) for token in tokens]
    candidates = [[pb.Candidate(token_id=c.token_id, logprob=c.logprob) for c in noun.top] for noun in nouns]
    return [pb.TokenLogprob(logprob=n.logprob, top=some) for n, some in zip(nouns, candidates, strict=True)]


# ------------------------------------------------------------------------------------------------- several outputs


async def test_each_output_has_its_own_text_stop_end_and_seed(server):
    asked = {
        "sampling": pb.SamplingParams(n=3, seed=100),
        "stopping": pb.StoppingParams(max_tokens=30, stop=["quick", "br", "ow"]),
    }
    whole = await server.inference.Generate(request(**asked))
    streamed, messages = await by_index(server.inference.GenerateStream(request(**asked)))
    assert [output.index for output in whole.outputs] == [0, 1, 2]
    for index, output in enumerate(whole.outputs):
        text, ids, _, (end,) = streamed[index]
        assert (text, ids) == (output.text, list(output.token_ids))
        assert tuple(ids) == server.engine.expected(len(ids), index)
        assert end.usage.completion_tokens == len(ids)
        assert (end.seed, end.index) == (100 + index, index)
        assert end.finish_reason == pb.FINISH_REASON_STOP
    assert [output.finished.stop_string for output in whole.outputs] == ["quick", "quick", "br"]
    assert len({len(output.token_ids) for output in whole.outputs}) == 3
    assert [bool(message.request_id) for message in messages] == [True] + [False] * (len(messages) - 1)
    assert server.engine.load.free_pages == server.engine.facts.total_pages
    assert metric(server, "requests_total", finish_reason="stop") == 2


async def test_cancel_and_abort_end_every_output():
    engine = FakeEngine(step_seconds=0.01)
    async with serving(engine) as server:
        asked = request(sampling=pb.SamplingParams(n=3), stopping=LONG)
        call = server.inference.GenerateStream(asked)
        await call.read()
        call.cancel()
        await until(lambda: engine.load.free_pages == engine.facts.total_pages)
        running = asyncio.ensure_future(by_index(server.inference.GenerateStream(asked)))
        await until(lambda: engine.load.num_running == 3)
        server.app.driver.end(*server.app.driver.live(), FinishReason.ABORTED)
        found, _ = await running
        assert [found[i][3][0].finish_reason for i in range(3)] == [pb.FINISH_REASON_ABORTED] * 3
        assert engine.load.free_pages == engine.facts.total_pages


async def test_a_fault_of_one_output_ends_the_call_once_and_frees_the_others(server):
    asked = {"token_ids": pb.TokenIds(ids=[9]), "sampling": pb.SamplingParams(n=3)}
    server.engine.poison = {9}
    for poisoned in range(3):
        server.engine.poisoned = {poisoned}
        error = await refused(server, **asked)
        assert error.code() == grpc.StatusCode.INTERNAL
        assert "poisoned" in error.details()
        await error_of(streamed(server, **asked))
        assert server.engine.load.free_pages == server.engine.facts.total_pages
        assert metric(server, "requests_total", finish_reason="error") == 2 * (poisoned + 1)
    await server.inference.Generate(request())


async def test_the_queue_counts_the_tokens_of_every_output():
    async with busy() as server:
        asked = request(sampling=pb.SamplingParams(n=3), token_ids=pb.TokenIds(ids=[1, 2]))
        second = asyncio.ensure_future(by_index(server.inference.GenerateStream(asked)))
        await until(lambda: len(server.app.driver.queue) == 1)
        assert server.app.driver.queue.num_tokens == 3 * (2 + 20)
        server.engine.gate.set()
        await second


# ------------------------------------------------------------------------------------------------ log-probabilities


async def test_every_kept_token_has_its_log_probability(server):
    for stop, top, token_ids in (([], 2, True), (["brown"], 0, True), ([], 0, False)):
        asked = {
            "sampling": pb.SamplingParams(n=2),
            "stopping": pb.StoppingParams(max_tokens=20, stop=stop),
            "output": pb.OutputOptions(logprobs=True, top_logprobs=top, token_ids=token_ids),
        }
        whole = await server.inference.Generate(request(**asked))
        found, messages = await by_index(server.inference.GenerateStream(request(**asked)))
        assert token_ids or not any(m.delta.from_draft or m.delta.text_lengths for m in messages)
        for output in whole.outputs:
            _, ids, logprobs, (end,) = found[output.index]
            assert ids == list(output.token_ids)
            kept = server.engine.expected(end.usage.completion_tokens, output.index)
            assert tuple(ids) == (kept if token_ids else ())
            assert logprobs == logprobs_of(kept, top)
            assert list(output.logprobs) == logprobs


async def test_a_slow_reader_gets_the_same_log_probabilities():
    engine = FakeEngine(burst=40)
    engine.max_model_len = 10**5
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]
    async with serving(engine, options=options) as server:
        asked = request(
            sampling=pb.SamplingParams(n=2),
            stopping=pb.StoppingParams(max_tokens=2000),
            output=pb.OutputOptions(logprobs=True, top_logprobs=3),
        )
        call = aiter(server.inference.GenerateStream(asked))
        first = await anext(call)
        await until(lambda: not engine.has_work)  # it is all made before the second message is read
        found, messages = await by_index(call)
        assert first.delta.index == 0
        for index in range(2):
            _, ids, logprobs, _ = found[index]
            skipped = 40 * (1 - index)
            assert tuple(ids) == engine.expected(2000, index)[skipped:]
            assert logprobs == logprobs_of(ids, 3)
        assert max(len(message.delta.token_ids) for message in messages) > 40, "nothing was merged"


async def test_prompt_log_probabilities_come_once_on_the_first_message(server):
    for ids in ([7], [7, 8, 9]):
        asked = {
            "token_ids": pb.TokenIds(ids=ids),
            "sampling": pb.SamplingParams(n=2),
            "output": pb.OutputOptions(prompt_logprobs=True, top_logprobs=1),
        }
        whole = await server.inference.Generate(request(**asked))
        _, messages = await by_index(server.inference.GenerateStream(request(**asked)))
        wanted = logprobs_of(ids[1:], 1)
        assert whole.HasField("prompt_logprobs")
        assert list(whole.prompt_logprobs.logprobs) == wanted
        assert [m.HasField("prompt_logprobs") for m in messages] == [True] + [False] * (len(messages) - 1)
        assert list(messages[0].prompt_logprobs.logprobs) == wanted
        assert not messages[0].delta.logprobs


# --------------------------------------------------------------------------------- what the engine gets, and gives


async def test_every_option_reaches_the_engine(server):
    sampling = pb.SamplingParams(
        repetition_penalty=1.5,
        presence_penalty=-1,
        frequency_penalty=0.5,
        logit_bias={3: -2.5},
        allowed_token_ids=pb.TokenIds(ids=[3, 4]),
        banned_token_ids=[5],
    )
    stopping = pb.StoppingParams(min_tokens=2, max_tokens=4)
    for salt in ("one", "two"):
        await server.inference.Generate(request(sampling=sampling, stopping=stopping, cache_salt=salt))
    await server.inference.Generate(request())
    first, second, bare = server.engine.requests
    assert [first.cache_salt, second.cache_salt, bare.cache_salt] == ["one", "two", None]
    got = first.sampling
    assert (got.repetition_penalty, got.presence_penalty, got.frequency_penalty) == (1.5, -1, 0.5)
    assert (got.logit_bias, got.allowed_token_ids, got.banned_token_ids) == ({3: -2.5}, (3, 4), (5,))
    assert (got.min_tokens, got.logprobs, got.prompt_logprobs) == (2, None, None)
    assert bare.sampling.allowed_token_ids is None
    assert (bare.sampling.n, bare.sampling.repetition_penalty) == (1, 1.0)


async def test_a_stop_string_within_min_tokens_is_text(server):
    stopping = pb.StoppingParams(max_tokens=60, min_tokens=15, stop=["the"])
    text, _, (end,), _ = await streamed(server, stopping=stopping)
    assert text == TEXT[: TEXT.index("the", 5)]
    assert end.stop_string == "the"


async def test_cached_prompt_tokens_and_cache_counters(server):
    answer = await server.inference.Generate(request(token_ids=pb.TokenIds(ids=[1, 2])))
    assert answer.outputs[0].finished.usage.cached_prompt_tokens == 1
    assert metric(server, "prefix_cache_queries_total") == 5 * server.engine.steps
    assert metric(server, "prefix_cache_hits_total") == 2 * server.engine.steps


# ----------------------------------------------------------------------------------------------- guided decoding


def guided(*choices):
    return pb.GuidedDecoding(choice=pb.Choice(choices=choices))


async def test_a_structure_is_compiled_elsewhere_and_every_output_has_it():
    compiler = FakeCompiler()
    async with serving(compile_grammar=compiler) as server:
        asked = request(guided=guided("and over"), sampling=pb.SamplingParams(n=2))
        answer = await server.inference.Generate(asked)
        assert [output.text for output in answer.outputs] == ["and over"] * 2
        assert [output.finished.stop_token_id for output in answer.outputs] == [EOS] * 2
        assert compiler.asked[0].choice == ("and over",)
        assert not compiler.threads & server.engine.threads
        error = await refused(server, guided=pb.GuidedDecoding(regex="a+"))
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "guided.regex is 'a+'" in error.details()
        assert metric(server, "admission_rejected_total", reason="invalid") == 1


async def test_a_slow_structure_stalls_no_other_and_has_deadline_and_cancellation(monkeypatch):
    compiler, pending = FakeCompiler(), []
    compiler.gate.clear()
    compile_one = SlowWork.compile

    async def counted(pool, *asked):
        pending.append(asked)
        try:
            return await compile_one(pool, *asked)
        finally:
            pending.remove(asked)

    monkeypatch.setattr(SlowWork, "compile", counted)
    async with serving(compile_grammar=compiler) as server:
        asked = request(guided=guided("a"))
        slow = [asyncio.ensure_future(by_index(server.inference.GenerateStream(asked))) for _ in range(2)]
        await until(lambda: len(compiler.asked) == 2)  # both threads are busy: others wait
        await server.inference.Generate(request())
        late = await error_of(server.inference.Generate(request(guided=guided("b")), timeout=0.3))
        assert late.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        gone = server.inference.GenerateStream(asked)
        waiting = asyncio.ensure_future(gone.read())
        await until(lambda: len(pending) == 3)
        gone.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await until(lambda: len(pending) == 2)  # neither of the two waits any more
        compiler.gate.set()
        for found, _ in await asyncio.gather(*slow):
            assert found[0][0] == "a"
        assert len(compiler.asked) == 2
        assert len(server.engine.requests) == 3


async def test_the_slot_of_an_abandoned_structure_is_freed():
    pool, gate, begun = SlowWork(max_compiling=1, max_pending=2), asyncio.Event(), []

    async def compile_one(name):
        begun.append(name)
        await gate.wait()

    def asked(name):
        return asyncio.create_task(pool.compile(partial(compile_one, name)))

    gone, left = asked("gone"), asked("left")
    await asyncio.sleep(0)
    with pytest.raises(QueueFull):
        await asked("refused")
    for call in (gone, left):
        call.cancel()
    await asyncio.wait([gone, left])
    late = asked("late")
    await asyncio.sleep(0)
    assert begun == ["gone"], "it goes on without its caller, in its place"
    gate.set()
    await late
    assert begun == ["gone", "late"]
    pool.close()
