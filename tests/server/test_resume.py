"""A stream that was cut goes on, on this server or another: nothing is missing, nothing comes twice."""

from __future__ import annotations

import asyncio
import json
import threading
from itertools import product

import grpc
import pytest

from pilotfish.client import Retry
from pilotfish.client.resume import Patience, ResumableStream
from pilotfish.engine.config import EngineConfig
from pilotfish.engine.text.codec import OutputText
from pilotfish.server.chat import ChatTemplate
from pilotfish.server.model import fingerprint
from pilotfish.v1 import control_pb2 as control
from pilotfish.v1 import generation_pb2 as pb
from tests.engine.text.test_codec import CODEC
from tests.server.fake_engine import TEXT, FakeEngine
from tests.server.fake_grammar import FakeCompiler
from tests.server.test_generate import collect, error_of, request, streamed
from tests.server.test_life import code_of, metric
from tests.serving import http_client, serving, until

KINDS = {
    "to the length": {"stopping": pb.StoppingParams(max_tokens=7)},
    "to a stop string": {"stopping": pb.StoppingParams(max_tokens=50, stop=["x says"])},
    "held back to the end": {"stopping": pb.StoppingParams(max_tokens=12, stop=["brown fox, never"])},
    "to a stop token": {"stopping": pb.StoppingParams(max_tokens=50, stop_token_ids=[CODEC.encode(TEXT)[13]])},
    "three outputs": {"sampling": pb.SamplingParams(n=3, seed=5), "stopping": pb.StoppingParams(max_tokens=8)},
    "logprobs": {"output": pb.OutputOptions(logprobs=True, prompt_logprobs=True, top_logprobs=3)},
    "digests": {"output": pb.OutputOptions(digests=True)},
    "a structure": {"guided": pb.GuidedDecoding(choice=pb.Choice(choices=["ab ab", "babab"]))},
}


def resumed(asked, received, *, tokens: bool) -> pb.GenerateRequest:
    """The request that continues the stream after the messages `received`."""
    info = received[0].resume_info
    again = pb.GenerateRequest()
    again.CopyFrom(asked)
    again.sampling.seed, again.stopping.max_tokens = info.seed, info.max_tokens
    again.speculation.CopyFrom(info.speculation)
    outputs: dict[int, pb.ReceivedOutput] = {}
    for message in received:
        part = message.finished if message.HasField("finished") else message.delta
        output = outputs.setdefault(part.index, pb.ReceivedOutput(index=part.index))
        if message.HasField("finished"):
            output.finished = True
        else:
            output.tail = len(part.text) > sum(part.text_lengths)
            if tokens:
                output.token_ids.extend(part.token_ids)
            else:
                output.num_tokens += len(part.token_ids)
                output.digest = part.digest
    again.resume.CopyFrom(pb.Resume(fingerprint=info.fingerprint, outputs=outputs.values()))
    return again


def resumed_by_our_client(asked, received) -> pb.GenerateRequest:
    stream = ResumableStream(asked, Patience(Retry(), deadline=None))
    stream.next_request()
    for message in received:
        stream.take(message)
    return stream.next_request()


def joined(messages) -> dict[int, tuple]:
    """What a caller has of each output."""
    found = {}
    for message in messages:
        part = message.finished if message.HasField("finished") else message.delta
        text, ids, logprobs, prompt, end = found.get(part.index, ("", (), (), (), None))
        if message.HasField("finished"):
            end = (part.finish_reason, part.WhichOneof("matched_stop"), part.usage.completion_tokens, part.seed)
        else:
            text, ids = text + part.text, ids + tuple(part.token_ids)
            logprobs += tuple(p.logprob for p in part.logprobs)
            prompt += tuple(p.logprob for p in message.prompt_logprobs.logprobs)
        found[part.index] = text, ids, logprobs, prompt, end
    return found


@pytest.mark.parametrize("tokens", [True, False], ids=["by tokens", "by number"])
async def test_cut_anywhere_it_goes_on_on_another_server(tokens):
    grammars, cuts = FakeCompiler(), 0
    async with serving(compile_grammar=grammars) as first, serving(compile_grammar=grammars) as second:
        for kind, fields in KINDS.items():
            shared = {"sampling": pb.SamplingParams(seed=3), "stopping": pb.StoppingParams(max_tokens=10)}
            asked = request(**shared | fields)
            messages = [message async for message in first.inference.GenerateStream(asked)]
            for cut in range(1, len(messages)):
                received = messages[:cut]
                again = resumed_by_our_client(asked, received) if tokens else resumed(asked, received, tokens=False)
                rest = [message async for message in second.inference.GenerateStream(again)]
                assert joined(received + rest) == joined(messages), (kind, cut)
                assert all(m.finished.interruptions == 1 for m in rest if m.HasField("finished"))
            cuts += len(messages) - 1
        assert metric(second, "resumed_requests_total") == cuts


async def test_tokens_that_cannot_be_computed_again_end_it(server):
    asked = request(output=pb.OutputOptions(digests=True), sampling=pb.SamplingParams(seed=3))
    messages = [message async for message in server.inference.GenerateStream(asked)]
    for tokens, change in ((False, {"digest": "0" * 16}), (False, {"num_tokens": 900}), (True, {"digest": "0" * 16})):
        again = resumed(asked, messages[:1], tokens=tokens)
        for name, value in change.items():
            setattr(again.resume.outputs[0], name, value)
        code = await code_of(collect(server.inference.GenerateStream(again)))
        assert code == grpc.StatusCode.FAILED_PRECONDITION, change
    assert (await streamed(server))[2]


Received = pb.ReceivedOutput
WRONG = {
    "sampling.seed": {"sampling": pb.SamplingParams(), "outputs": []},
    "resume.outputs[0].index": {"outputs": [Received(index=1, token_ids=[5])]},
    "resume.outputs[1].index": {"outputs": [Received(token_ids=[5]), Received(token_ids=[5])], "n": 2},
    "resume.outputs[0].token_ids[1]": {"outputs": [Received(token_ids=[5, 10**6])]},
    "resume.outputs[0].token_ids": {"outputs": [Received(token_ids=[5] * 21)]},
    "resume.outputs[0].num_tokens": {"outputs": [Received(token_ids=[5], num_tokens=1)]},
    "resume.outputs": {"outputs": [Received(finished=True)]},
}


def continued(*outputs, **fields):
    """A request that continues a stream of the fake after these outputs."""
    resume = pb.Resume(fingerprint="fa4e", outputs=outputs)
    return request(**{"sampling": pb.SamplingParams(seed=3), "resume": resume} | fields)


async def test_what_is_wrong_is_named():
    async with serving(compile_grammar=FakeCompiler()) as server:
        for field, wrong in WRONG.items():
            sampling = wrong.get("sampling", pb.SamplingParams(seed=3, n=wrong.get("n", 1)))
            asked = continued(*wrong["outputs"], sampling=sampling)
            error = await error_of(collect(server.inference.GenerateStream(asked)))
            assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert error.details().startswith(f"{field} ")
        asked = continued(Received(token_ids=[5, 6]), guided=pb.GuidedDecoding(choice=pb.Choice(choices=["ab"])))
        error = await error_of(collect(server.inference.GenerateStream(asked)))
        assert "resume.outputs[0].token_ids[0] is 5, which does not fit" in error.details()
        error = await error_of(server.inference.Generate(request(resume=pb.Resume())))
        assert "resume is only supported by GenerateStream" in error.details()


async def test_what_was_received_is_replayed_in_parts_beside_the_loop(monkeypatch):
    """Its text and its stop strings can take seconds: nobody else waits for more than one part of it."""
    seen = []
    push = OutputText.push

    def watched(text, tokens):
        seen.append((len(tokens), threading.current_thread() is threading.main_thread()))
        return push(text, tokens)

    async with serving() as server:
        received = [Received(index=i, token_ids=server.engine.expected(1000, i)) for i in range(2)]
        sampling, stopping = pb.SamplingParams(seed=3, n=2), pb.StoppingParams(max_tokens=1001, stop=["never said"])
        asked = continued(*received, sampling=sampling, stopping=stopping)
        monkeypatch.setattr(OutputText, "push", watched)
        _, tokens, ends, _ = await collect(server.inference.GenerateStream(asked))
    assert sorted(tokens) == sorted(server.engine.expected(1001, i)[-1] for i in range(2))
    assert [end.usage.completion_tokens for end in ends] == [1001, 1001]
    beside = [length for length, is_on_loop in seen if not is_on_loop]
    assert beside == [256, 256, 256, 232] * 2
    assert max(length for length, _ in seen) <= 256


async def test_a_proposer_that_another_server_had_is_needed_only_where_tokens_depend_on_it(server):
    speculation = pb.SpeculationOptions(proposer="eagle", verification=pb.VERIFICATION_COUPLED)
    again = continued(Received(token_ids=server.engine.expected(3)), speculation=speculation)
    _, tokens, _, _ = await collect(server.inference.GenerateStream(again))
    assert tuple(tokens) == server.engine.expected(20)[3:]
    speculation.verification = pb.VERIFICATION_REJECTION
    depends = continued(Received(token_ids=server.engine.expected(3)), speculation=speculation)
    again.ClearField("resume")
    for asked in (again, depends):
        assert (await code_of(collect(server.inference.GenerateStream(asked)))).name == "UNIMPLEMENTED"


async def test_an_abort_ends_it_while_its_tokens_are_computed_again():
    engine = FakeEngine(step_seconds=0.002)
    async with serving(engine) as server:
        asked = continued(Received(num_tokens=2000), request_id="me", stopping=pb.StoppingParams(max_tokens=3000))
        reading = asyncio.ensure_future(collect(server.inference.GenerateStream(asked)))
        await until(lambda: engine.steps > 2)
        await server.control.Abort(control.AbortRequest(request_id="me"))
        _, tokens, (end,), _ = await reading
        assert (list(tokens), end.finish_reason) == ([], pb.FINISH_REASON_ABORTED)


BODIES = {
    "/generate": {"prompt": "ab", "max_new_tokens": 10},
    "/v1/completions": {
        "prompt": "ab",
        "max_tokens": 10,
        "n": 2,
        "logprobs": 1,
        "stream_options": {"include_usage": True},
    },
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 10},
}

CHAT = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {})


async def events_of(client, path, body, after=None):
    """(id, data) of each event."""
    headers = {} if after is None else {"Last-Event-ID": after}
    async with client.stream("POST", path, json=body | {"stream": True, "event_ids": True}, headers=headers) as answer:
        assert answer.status_code == 200, await answer.aread()
        blocks = (await answer.aread()).decode().split("\n\n")[:-1]
    found = []
    for block in blocks:
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        found.append((fields.get("id"), fields["data"]))
    return found


def said(events) -> dict[int, str]:
    """The text of each choice."""
    texts: dict[int, str] = {}
    for _, data in events:
        event = {} if data == "[DONE]" else json.loads(data)
        for choice in event.get("choices", [event]):
            piece = choice.get("delta", {}).get("content") or choice.get("text") or ""
            texts[choice.get("index", 0)] = texts.get(choice.get("index", 0), "") + piece
    return texts


def usage_of(events):
    """What the last event but one says of tokens."""
    event = json.loads(events[-2][1])
    return event.get("usage"), event.get("prompt_tokens"), event.get("completion_tokens")


async def test_over_http_an_event_has_an_id_after_which_another_server_goes_on():
    async with (
        serving(chat=CHAT) as first,
        serving(chat=CHAT) as second,
        http_client(first) as here,
        http_client(second) as there,
    ):
        assert "id:" not in (await here.post("/generate", json={"prompt": "ab", "stream": True})).text, "unasked"
        for path, body in BODIES.items():
            whole = await events_of(here, path, body)
            numbered = [i for i, (event_id, _) in enumerate(whole) if event_id]
            assert len(numbered) > 3
            for cut in numbered[:-1]:
                rest = await events_of(there, path, body, whole[cut][0])
                assert said(whole[: cut + 1] + rest) == said(whole), cut
                assert [data for _, data in rest][-1] == "[DONE]"
                assert usage_of(rest) == usage_of(whole)


@pytest.mark.parametrize("max_tokens", [6, 300])
async def test_an_aborted_stream_ends_where_it_ended(max_tokens):
    """Its tokens are computed again for the usage alone: what held text back at the end is not sent twice."""
    engine = FakeEngine(burst=1, step_seconds=0.02)
    body = BODIES["/v1/completions"] | {"max_tokens": max_tokens, "stop": ["quick brown fox, never"]}
    async with serving(engine) as server, http_client(server) as client:
        reading = asyncio.create_task(events_of(client, "/v1/completions", body))
        await until(lambda: engine.steps > 2)
        engine.gate.clear()
        await server.control.Abort(control.AbortRequest(all=True))
        engine.gate.set()
        whole = await reading
        last = max(i for i, (event_id, _) in enumerate(whole) if event_id)
        assert 0 < usage_of(whole)[0]["completion_tokens"] < 2 * max_tokens
        rest = await events_of(client, "/v1/completions", body, whole[last][0])
        assert not any(said(rest).values())
        assert usage_of(rest) == usage_of(whole)


async def test_who_asks_for_a_recount_gets_the_end_again_as_it_was(server):
    kinds = [KINDS[kind] for kind in ("to the length", "to a stop string", "to a stop token")]
    for fields, tokens in product((*kinds, {"stopping": pb.StoppingParams(max_tokens=300)}), (True, False)):
        asked = request(sampling=pb.SamplingParams(seed=3), **fields)
        messages = [message async for message in server.inference.GenerateStream(asked)]
        again = resumed(asked, messages, tokens=tokens)
        for output in again.resume.outputs:
            output.recount, output.tail = True, True
        (message,) = [message async for message in server.inference.GenerateStream(again)]
        end, before = message.finished, messages[-1].finished
        assert end.usage.completion_tokens == before.usage.completion_tokens
        assert (end.finish_reason, end.seed) == (before.finish_reason, before.seed)


async def test_after_a_pause_the_first_message_comes_at_once_whatever_the_interval(server):
    """It renews the client's budget of attempts, and has what another continuation needs."""
    asked = continued(Received(token_ids=server.engine.expected(3)), output=pb.OutputOptions(stream_interval=200))
    first = await anext(aiter(server.inference.GenerateStream(asked)))
    assert first.HasField("resume_info")
    assert len(first.delta.token_ids) < 17


async def test_replays_count_as_requests_that_arrive(monkeypatch):
    gate = threading.Event()
    monkeypatch.setattr(OutputText, "push", lambda *_: gate.wait(30) and None)
    async with serving(max_queue_requests=1) as server:
        asked = continued(Received(token_ids=[5, 6, 7]))
        calls = [asyncio.create_task(collect(server.inference.GenerateStream(asked))) for _ in range(2)]
        done, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        gate.set()
        (refused,) = done
        assert refused.exception().code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        await asyncio.gather(*calls, return_exceptions=True)


async def test_an_id_that_is_none_is_refused(server):
    async with http_client(server) as client:
        body = {"prompt": "ab", "stream": True}
        for after in (
            "nonsense",
            "ab-1-0-zz",
            "ab-1-0-1",  # a number of tokens without their digest
            "ab-1-0-0:0123456789abcdef",
            "ab-99999999999999999999-0-1",
            "ab-1-0-" + ",".join(["0"] * 65),  # more outputs than a request may have
        ):
            answer = await client.post("/generate", json=body, headers={"Last-Event-ID": after})
            assert answer.status_code == 400
            assert f"Last-Event-ID is '{after[:20]}" in answer.json()["error"]["message"]
        headers = {"Last-Event-ID": "ab-1-0-1:0123456789abcdef"}
        answer = await client.post("/generate", json={"prompt": "ab"}, headers=headers)
        assert "requires stream: true" in answer.json()["error"]["message"]
        answer = await client.post("/generate", json=body, headers=headers)
        assert answer.status_code == 412


def test_a_fingerprint_follows_the_weights_and_the_tokenizer(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(3 << 20))
    config = EngineConfig(target=str(tmp_path))
    seen = {fingerprint(config, "float32"), fingerprint(config, "bfloat16")}
    seen.add(fingerprint(config.model_copy(update={"weights": "int8"}), "float32"))
    seen.add(fingerprint(config.model_copy(update={"kv_cache_dtype": "int8"}), "float32"))
    (tmp_path / "tokenizer.json").write_text("{}")
    seen.add(fingerprint(config, "float32"))
    weights = bytearray(3 << 20)
    weights[(1 << 20) + 5] = 1
    (tmp_path / "model.safetensors").write_bytes(weights)
    seen.add(fingerprint(config, "float32"))
    assert len(seen) == 6
    drafted = config.model_copy(update={"draft": (str(tmp_path),)})
    assert fingerprint(drafted, "float32") in seen
