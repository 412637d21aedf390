"""Generate and GenerateStream over real gRPC: the laws of a stream, and what a caller gets for each mistake."""

from __future__ import annotations

import asyncio
from itertools import product

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from pilotfish.engine.errors import InvalidRequest
from pilotfish.v1 import control_pb2
from pilotfish.v1 import generation_pb2 as pb
from tests.engine.text.test_codec import CODEC
from tests.server.fake_engine import TEXT
from tests.serving import serving


def request(**fields):
    fields.setdefault("stopping", pb.StoppingParams(max_tokens=20))
    if not {"prompt", "token_ids", "messages"} & fields.keys():
        fields["prompt"] = "ab"
    return pb.GenerateRequest(**fields)


async def collect(call):
    """(text, token ids, finished messages, all messages) of a stream."""
    messages = [message async for message in call]
    deltas = [m.delta for m in messages if m.WhichOneof("event") == "delta"]
    ends = [m.finished for m in messages if m.WhichOneof("event") == "finished"]
    return "".join(d.text for d in deltas), [t for d in deltas for t in d.token_ids], ends, messages


async def streamed(server, **fields):
    """What `collect` makes of the stream of a request with these fields."""
    return await collect(server.inference.GenerateStream(request(**fields)))


async def error_of(call):
    """What a call that is refused or cut ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return error.value


def detail(error, kind):
    """The one detail of an error's google.rpc.Status."""
    status = status_pb2.Status.FromString(dict(error.trailing_metadata())["grpc-status-details-bin"])
    assert status.code == error.code().value[0]
    assert status.message == error.details()
    unpacked = kind()
    assert status.details[0].Unpack(unpacked)
    return unpacked


async def test_joined_stream_is_the_unary_answer(server):
    for max_tokens, stop in product((1, 7, 40), ([], ["x says", "fox"], ["never"])):
        stopping = pb.StoppingParams(max_tokens=max_tokens, stop=stop)
        (output,) = (await server.inference.Generate(request(stopping=stopping))).outputs
        text, ids, (end,), messages = await streamed(server, stopping=stopping)
        assert (text, ids) == (output.text, list(output.token_ids))
        assert messages[-1].HasField("finished")
        assert (end.finish_reason, end.usage) == (output.finished.finish_reason, output.finished.usage)
        assert end.usage.completion_tokens == len(ids)
        assert [bool(m.request_id) for m in messages] == [True] + [False] * (len(messages) - 1)


@pytest.mark.parametrize("stop", ["quick", "fox"])  # which is complete at the end of a step, and in the middle of one
async def test_a_stop_string_cuts_text_tokens_and_usage(server, stop):
    stopping = pb.StoppingParams(max_tokens=100, stop=["lazy", stop])
    text, ids, (end,), _ = await streamed(server, stopping=stopping)
    assert text == TEXT[: TEXT.index(stop)]
    assert tuple(ids) == server.engine.expected(len(ids))
    assert CODEC.decode(ids).endswith(stop)
    assert end.finish_reason == pb.FINISH_REASON_STOP
    assert end.stop_string == stop
    assert end.usage.completion_tokens == len(ids)
    assert server.engine.load.free_pages == server.engine.facts.total_pages
    for more in range(3):  # the last token that may come completes it, or is in the same step or the next
        stopping.max_tokens = len(ids) + more
        _, _, (last,), _ = await streamed(server, stopping=stopping)
        assert (last.finish_reason, last.stop_string, last.usage) == (end.finish_reason, end.stop_string, end.usage)


async def test_a_stop_token_is_in_the_ids_and_not_in_the_text(server):
    (colon,) = CODEC.encode("q")
    stopping = pb.StoppingParams(max_tokens=100, stop_token_ids=[colon])
    text, ids, (end,), _ = await streamed(server, stopping=stopping)
    assert text == TEXT[: TEXT.index("q")]
    assert ids[-1] == colon == end.stop_token_id
    assert end.finish_reason == pb.FINISH_REASON_STOP


async def test_text_lengths_split_the_text_by_token(server):
    call = server.inference.GenerateStream(request(stopping=pb.StoppingParams(max_tokens=40, stop=["zzz"])))
    deltas = [m.delta async for m in call if m.HasField("delta")]
    for delta in deltas:
        assert len(delta.text_lengths) == len(delta.from_draft) == len(delta.token_ids)
    assert all(sum(d.text_lengths) == len(d.text) for d in deltas[:-1])
    assert any(flag for d in deltas for flag in d.from_draft)


async def test_a_truncated_character_comes_with_the_last_delta(server):
    ids = CODEC.encode(TEXT[: TEXT.index("€") + 1])[:-1]
    stopping = pb.StoppingParams(max_tokens=len(ids))
    text, got, _, _ = await streamed(server, stopping=stopping)
    assert tuple(got) == ids
    assert text == CODEC.decode(ids)
    assert text.endswith("�")


async def test_finished_has_usage_timing_seed_and_speculation(server):
    sampling = pb.SamplingParams(temperature=0.7, seed=2**64 - 1)
    answer = await server.inference.Generate(request(sampling=sampling, request_id="r:1"))
    end = answer.outputs[0].finished
    assert answer.request_id == "r:1"
    assert answer.model == "fake"
    assert end.usage.prompt_tokens == len(CODEC.encode("ab"))
    assert end.seed == 2**64 - 1
    assert end.finish_reason == pb.FINISH_REASON_LENGTH
    assert end.WhichOneof("matched_stop") is None
    assert 0 <= end.timing.queue_seconds <= end.timing.time_to_first_token_seconds <= end.timing.total_seconds
    assert end.speculation_stats.acceptance_length == 3.0
    assert end.speculation.proposer == "ngram"
    assert end.speculation.verification == pb.VERIFICATION_COUPLED


async def test_stream_interval_gathers_tokens_after_the_first(server):
    asked = request(output=pb.OutputOptions(stream_interval=10), stopping=pb.StoppingParams(max_tokens=60))
    deltas = [m.delta async for m in server.inference.GenerateStream(asked) if m.HasField("delta")]
    assert len(deltas[0].token_ids) == 3
    assert all(len(d.token_ids) >= 10 for d in deltas[1:-1])


async def test_many_streams_at_once_each_get_their_own(server):
    lengths = range(1, 13)  # three times as many as there is room for
    calls = [streamed(server, stopping=pb.StoppingParams(max_tokens=n)) for n in lengths]
    for n, (text, ids, ends, _) in zip(lengths, await asyncio.gather(*calls), strict=True):
        assert tuple(ids) == server.engine.expected(n)
        assert text == CODEC.decode(ids)
        assert len(ends) == 1
    assert server.engine.load.free_pages == server.engine.facts.total_pages
    assert len(server.engine.threads) == 1


async def test_a_model_without_a_tokenizer_serves_token_ids():
    async with serving(codec=None) as server:
        text, ids, _, _ = await streamed(server, token_ids=pb.TokenIds(ids=[5]))
        assert (text, tuple(ids)) == ("", server.engine.expected(20))
        error = await refused(server, stopping=pb.StoppingParams(stop=["x"]))
        fields = {v.field for v in detail(error, error_details_pb2.BadRequest).field_violations}
        assert fields == {"prompt", "stopping.stop"}
        error = await error_of(server.control.Tokenize(control_pb2.TokenizeRequest(text="a")))
        assert error.code() == grpc.StatusCode.UNIMPLEMENTED


# ----------------------------------------------------------------------------------------------------- refusals


async def refused(server, **fields):
    return await error_of(server.inference.Generate(request(**fields)))


async def test_what_this_server_does_not_have_is_refused_by_name(server):
    """`tests/e2e/bad_inputs.py` has models and proposers."""
    for fields, code, named in (
        ({"guided": pb.GuidedDecoding(regex="a+")}, "UNIMPLEMENTED", "guided"),
        ({"messages": {"messages": [{"role": "user", "content": "hi"}]}}, "INVALID_ARGUMENT", "messages"),
    ):
        error = await refused(server, **fields)
        assert error.code().name == code
        assert named in error.details()


async def test_a_request_that_the_engine_refuses_after_all_fails_alone(server, monkeypatch):
    """`tests/e2e/test_faults.py` has the other places where one can fail."""
    add = server.engine.add

    def faulty(asked):
        if asked.request_id == "bad":
            raise InvalidRequest.of("prompt", "is odd")
        return add(asked)

    monkeypatch.setattr(server.engine, "add", faulty)
    healthy = server.inference.Generate(request())
    error = await refused(server, request_id="bad")
    assert error.code() == grpc.StatusCode.INTERNAL
    assert "InvalidRequest" not in error.details()
    assert tuple((await healthy).outputs[0].token_ids) == server.engine.expected(20)
