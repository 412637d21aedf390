"""Both clients over a real wire. Each law is stated once and run on both, the async one in its own loop."""

from __future__ import annotations

import asyncio
import json

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotfish import client
from pilotfish.client import convert
from pilotfish.v1 import generation_pb2 as pb
from tests.client import fake_server
from tests.client.blocking import blocking
from tests.client.fake_server import FINISHED, free_port, invalid, refusal


@pytest.fixture(params=["sync", "async"])
def connected(request, fake):
    with blocking(request.param, fake.address) as connection:
        yield connection


def test_what_is_left_out_is_not_sent_and_zero_is_sent_as_zero(connected, fake):
    connected.generate("def f")
    connected.generate([1, 2], temperature=0.0, seed=0, num_draft_tokens=0, ignore_eos=False)
    nothing, zeros = fake.requests
    parts = {"sampling": pb.SamplingParams(), "stopping": pb.StoppingParams(), "output": pb.OutputOptions()}
    parts["speculation"] = pb.SpeculationOptions()
    assert nothing == pb.GenerateRequest(prompt="def f", **parts)
    parts["sampling"], parts["stopping"] = (
        pb.SamplingParams(temperature=0.0, seed=0),
        pb.StoppingParams(ignore_eos=False),
    )
    parts["speculation"] = pb.SpeculationOptions(num_draft_tokens=0)
    assert zeros == pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2]), **parts)


SAMPLING = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.05,
    "repetition_penalty": 1.5,
    "presence_penalty": 0.25,
    "frequency_penalty": 0.125,
    "seed": 2**64 - 1,
    "n": 2,
    "logit_bias": {7: -1.5},
    "banned_token_ids": [9],
}
STOPPING = {"max_tokens": 9, "min_tokens": 2, "stop": ["\n\n", "def"], "stop_token_ids": [3], "ignore_eos": True}
OUTPUT = {"stream_interval": 4, "logprobs": True, "top_logprobs": 3, "prompt_logprobs": True}
PLAIN = {"request_id": "me", "model": "tiny", "priority": 1, "cache_salt": "tenant"}
EVERY_OPTION = {
    **(PLAIN | SAMPLING | STOPPING | OUTPUT),
    "allowed_token_ids": [7, 8],
    "regex": "a+",
    "speculation": "fixed",
    "num_draft_tokens": 3,
    "proposer": "ngram",
    "verification": "rejection",
}
EVERY_FIELD = pb.GenerateRequest(
    prompt="x",
    sampling=pb.SamplingParams(**SAMPLING, allowed_token_ids=pb.TokenIds(ids=[7, 8])),
    guided=pb.GuidedDecoding(regex="a+"),
    stopping=pb.StoppingParams(**STOPPING),
    output=pb.OutputOptions(**OUTPUT),
    speculation=pb.SpeculationOptions(
        mode=pb.SPECULATION_MODE_FIXED,
        num_draft_tokens=3,
        proposer="ngram",
        verification=pb.VERIFICATION_REJECTION,
    ),
    **PLAIN,
)


def test_every_option_arrives_in_its_field(connected, fake):
    list(connected.stream("x", **EVERY_OPTION))
    assert fake.requests == [EVERY_FIELD]


STRUCTURES = [
    ({"json_schema": '{"type": "null"}'}, pb.GuidedDecoding(json_schema='{"type": "null"}')),
    ({"json_schema": {"const": "ü"}}, pb.GuidedDecoding(json_schema=json.dumps({"const": "ü"}))),
    ({"grammar": "start: /a/"}, pb.GuidedDecoding(grammar="start: /a/")),
    ({"choice": ["yes", "no"]}, pb.GuidedDecoding(choice=pb.Choice(choices=["yes", "no"]))),
]


def test_every_structure_arrives_in_its_field(connected, fake):
    for options, _ in STRUCTURES:
        connected.generate("x", **options)
    assert [request.guided for request in fake.requests] == [guided for _, guided in STRUCTURES]
    connected.generate("x", allowed_token_ids=[])
    assert fake.requests[-1].sampling.HasField("allowed_token_ids")  # none allowed is not the same as not set
    assert not fake.requests[-1].HasField("guided")


def test_a_conversation_is_a_prompt(connected, fake):
    connected.generate([{"role": "system", "content": "be brief"}, client.ChatMessage(role="user", content="hi")])
    [request] = fake.requests
    assert [(m.role, m.content) for m in request.messages.messages] == [("system", "be brief"), ("user", "hi")]


@pytest.mark.parametrize(
    "wrong",
    [{"temprature": 1.0}, {"stop": "def"}, {"regex": "a", "choice": ["a"]}],
    ids=["misspelt", "stop is no list", "two structures"],
)
def test_a_wrong_option_is_a_type_error_here(connected, fake, wrong):
    with pytest.raises(TypeError):
        connected.generate("x", **wrong)
    assert not fake.requests


def test_a_completion_has_everything(connected):
    done = connected.generate("x")
    assert (done.request_id, done.model, done.text) == ("r1", "tiny", " retürn a+b")
    assert done.token_ids == (5, 6, 7, 8)
    assert done.from_draft == (True, False, True, False)
    finished = done.finished
    assert (finished.finish_reason, finished.stop_string, finished.stop_token_id) == ("stop", "\n\n", None)
    assert finished.speculation == client.Speculation(
        mode="auto", num_draft_tokens=4, proposer="model", verification="coupled"
    )
    assert finished.speculation_stats.accepted_per_position == (2, 0, 0, 0)
    assert finished.speculation_stats.acceptance_rate == 0.25
    assert finished.tokens_per_second == 2.0  # 4 tokens in 2.5 s less 0.5 s of queue
    assert finished.seed == 2**64 - 1


def test_several_outputs_and_log_probabilities(connected, fake):
    top = pb.TokenLogprob(logprob=-0.5, top=[pb.Candidate(token_id=5, logprob=-0.25)])
    outputs = [pb.Output(index=i, text=str(i), token_ids=[i], logprobs=[top], finished=FINISHED) for i in range(2)]
    prompt = pb.PromptLogprobs(logprobs=[top])
    fake.answer = pb.GenerateResponse(outputs=outputs, prompt_logprobs=prompt)
    fake.events = [
        pb.GenerateStreamResponse(delta=pb.TokenDelta(index=1, logprobs=[top]), prompt_logprobs=prompt),
        pb.GenerateStreamResponse(delta=pb.TokenDelta(index=0)),
    ]
    logprob = client.TokenLogprob(-0.5, (client.Candidate(5, -0.25),))
    done = connected.generate("x", n=2)
    assert [(output.index, output.text, output.logprobs) for output in done.outputs] == [
        (0, "0", (logprob,)),
        (1, "1", (logprob,)),
    ]
    assert (done.text, done.token_ids, done.logprobs) == ("0", (0,), (logprob,))
    assert done.prompt_logprobs == (None, logprob)
    first, second, _ = connected.stream("x")
    assert (first.index, first.logprobs, first.prompt_logprobs) == (1, (logprob,), (None, logprob))
    assert (second.index, second.logprobs, second.prompt_logprobs) == (0, (), None)


def test_a_stream_is_deltas_and_one_end(connected):
    *deltas, end = connected.stream("x")
    assert "".join(delta.text for delta in deltas) == connected.generate("x").text
    assert end == connected.generate("x").finished


def delta(text: str, lengths: list[int], from_draft: list[bool]) -> client.Delta:
    return client.Delta(
        index=0, text=text, token_ids=tuple(lengths), from_draft=tuple(from_draft), text_lengths=tuple(lengths)
    )


def test_pieces_follow_tokens():
    # The middle token brought the first byte of "ü" only, so it brought no text.
    got = list(delta("deü f", [2, 0, 1], [True, True, False]).pieces())
    assert got == [client.Piece("de", True), client.Piece("ü", False), client.Piece(" f", None)]


@settings(max_examples=30)
@given(st.lists(st.tuples(st.text(max_size=4), st.booleans()), max_size=6), st.text(max_size=4))
def test_pieces_join_to_the_text(tokens, rest):
    text = "".join(part for part, _ in tokens) + rest
    cut = delta(text, [len(part) for part, _ in tokens], [draft for _, draft in tokens])
    assert "".join(piece.text for piece in cut.pieces()) == text


def test_a_reason_from_a_newer_server_keeps_its_number():
    assert convert.finished(pb.Finished(finish_reason=99)).finish_reason == "99"


def test_the_control_calls(connected, fake):
    assert connected.server_info().state == "ready"
    model = connected.model_info()
    assert (model.model, model.proposers, model.eos_token_ids) == ("tiny", ("model", "ngram"), (0,))
    load = connected.load()
    assert (load.running_requests, load.waiting_requests, load.total_pages, load.free_pages) == (1, 2, 64, 63)
    assert connected.abort("me") == 1
    assert connected.abort_all() == 7
    assert connected.tokenize("añ") == (97, 241)
    assert connected.detokenize([97, 241]) == "añ"
    assert connected.health() == "SERVING"
    assert fake.requests[3].request_id == "me"
    assert all(9.0 < deadline < 11.0 for deadline in fake.deadlines)


def test_a_deadline_reaches_the_server_and_who_passes_it_hears_so(connected, fake):
    connected.generate("x", deadline=7.0)
    assert fake.deadlines[-1] == pytest.approx(7.0, abs=2.0)
    fake.hold = True
    with pytest.raises(client.DeadlineExceededError):
        list(connected.stream("x", deadline=0.2))


def test_all_violations_arrive(connected, fake):
    fake.status = invalid(**{"sampling.top_p": "is 2", "prompt": "is empty"})
    for ask in (lambda: connected.generate(""), lambda: list(connected.stream("")), connected.load):
        with pytest.raises(client.InvalidRequestError, match="2 problems") as caught:
            ask()
        assert caught.value.violations == (
            client.FieldViolation("sampling.top_p", "is 2"),
            client.FieldViolation("prompt", "is empty"),
        )


ERRORS = {
    "UNIMPLEMENTED": client.UnsupportedError,
    "NOT_FOUND": client.NotFoundError,
    "ALREADY_EXISTS": client.AlreadyExistsError,
    "RESOURCE_EXHAUSTED": client.QueueFullError,
    "UNAVAILABLE": client.UnavailableError,
    "ABORTED": client.AbortedError,
    "CANCELLED": client.CancelledError,
    "INTERNAL": client.ServerFaultError,
    "PERMISSION_DENIED": client.PermissionDeniedError,
    "UNAUTHENTICATED": client.UnauthenticatedError,
    "DATA_LOSS": client.RequestFailedError,
}


def test_each_status_has_its_error(fake):
    with client.Client(fake.address, retry=None) as connected:
        for code, kind in ERRORS.items():
            fake.status = refusal(grpc.StatusCode[code], "because")
            with pytest.raises(client.RequestFailedError) as caught:
                connected.generate("x")
            assert type(caught.value) is kind
            assert (caught.value.code.name, caught.value.message) == (code, "because")


async def test_cancelling_the_task_cancels_the_call(fake):
    fake.hold = True
    async with client.AsyncClient(fake.address) as connection:
        events = connection.stream("x")
        await anext(events)
        following = asyncio.create_task(anext(events))
        await asyncio.sleep(0.01)
        assert not fake.call_ended.is_set()
        following.cancel()
        with pytest.raises(asyncio.CancelledError):
            await following
        assert await asyncio.to_thread(fake.call_ended.wait, 5)


def test_waiting_for_a_server_ends_when_it_serves_and_no_question_outlasts_the_deadline(connected, fake):
    fake.health.serves(False)
    with pytest.raises(TimeoutError):
        connected.wait_until_serving(0.3)
    assert len(fake.health.deadlines) > 1
    if isinstance(connected, client.Client):  # the other one cancels its question
        assert max(fake.health.deadlines) < 0.4, "but for what gRPC rounds up"
    fake.health.serves(True)
    connected.wait_until_serving(5.0)


def test_waiting_for_a_server_that_is_not_there_yet():
    port = free_port()
    with client.Client(f"127.0.0.1:{port}") as connection:
        with pytest.raises(TimeoutError):
            connection.wait_until_serving(0.3)
        with fake_server.running(port):
            connection.wait_until_serving(5.0)
