"""What stands between Ray and a caller, without Ray: envelopes, Ray's words in ours, options with no effect."""

from __future__ import annotations

import math
import threading
from contextlib import asynccontextmanager

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from deploy.ray.edge import REMAINING, _Call, _ours, add_inference
from deploy.ray.envelope import Envelope, Status, opened
from deploy.ray.replica import WITHOUT_EFFECT, _remaining, configured
from pilotfish.engine.errors import InvalidRequest
from pilotfish.server.admission.slow_work import MAX_MIDDLE_BYTES
from pilotfish.server.config import ServerConfig
from pilotfish.server.errors import QueueFull, Unavailable
from pilotfish.v1 import generation_pb2 as pb
from pilotfish.v1 import generation_pb2_grpc
from tests.server.test_generate import detail
from tests.serving import serving


@pytest.mark.parametrize("text", ["", "some text", "\0\1"])
def test_a_message_comes_out_as_it_went_in(text):
    message = pb.GenerateRequest(prompt=text)
    assert opened(Envelope.of(message).SerializeToString()) == message.SerializeToString()


def test_an_error_comes_out_with_its_details():
    status = opened(Envelope.refused(QueueFull("no room", bound="requests", retry_seconds=2.5)).data)
    assert isinstance(status, Status)
    assert (status.code, status.message) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "no room")
    trailers = dict(status.trailers)
    assert trailers["grpc-retry-pushback-ms"] == "2500"
    told = status_pb2.Status.FromString(trailers["grpc-status-details-bin"])
    retry = error_details_pb2.RetryInfo()
    assert told.details[0].Unpack(retry)
    assert retry.retry_delay.ToMilliseconds() == 2500
    final = opened(Envelope.refused(InvalidRequest.of("prompt", "is empty")).data)
    assert final.code is grpc.StatusCode.INVALID_ARGUMENT
    assert "grpc-retry-pushback-ms" not in dict(final.trailers)
    fault = opened(Envelope.failed().data)  # a fault of ours says no more than that
    assert (fault.code, fault.message) == (grpc.StatusCode.INTERNAL, "internal error")


@pytest.mark.parametrize("code", grpc.StatusCode)
def test_rays_own_words_are_kept_only_where_they_are_harmless(code):
    error = _ours(code)
    if code.name in ("OK", "CANCELLED", "DEADLINE_EXCEEDED", "NOT_FOUND"):
        assert error is None
    elif code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        assert isinstance(error, QueueFull)
    else:
        assert isinstance(error, Unavailable)
        assert error.reason == "REPLICA_LOST"


class Context:
    """Of a call with metadata of its own, one pair of which only the edge may write."""

    def __init__(self, remaining):
        self._remaining = remaining

    def invocation_metadata(self):
        return (("a", "b"), (REMAINING, "1e9"))

    def time_remaining(self):
        return self._remaining

    def peer(self):
        return "somebody"


@pytest.mark.parametrize(("remaining", "seconds"), [(None, math.inf), (2.5, 2.5)])
def test_a_replica_gets_the_deadline_only_from_the_edge(remaining, seconds):
    call = _Call(Context(remaining))
    assert call.peer() == "somebody"
    assert call.invocation_metadata()[0] == ("a", "b")
    assert _remaining(call)() == pytest.approx(seconds, abs=1.0)


# -------------------------------------------------------------------------------------------- messages of the callers


class Request:
    """The class of a message, as its parser knows it, that notes on which thread it is parsed."""

    DESCRIPTOR = pb.GenerateRequest.DESCRIPTOR

    def __init__(self):
        self.threads = []

    def FromString(self, data):
        self.threads.append(threading.current_thread())
        return pb.GenerateRequest.FromString(data)


class Ray:
    """A server that does what Ray's does: it replaces each method by one that sends the call to a replica."""

    def __init__(self, server):
        self._server, self.kind, self.prompts = server, Request(), []

    def add_generic_rpc_handlers(self, handlers):
        (edge,) = handlers
        methods = {"request_deserializer": self.kind.FromString, "response_serializer": None}
        methods |= {"unary_unary": self._answer, "unary_stream": self._answers}
        handled = edge._method_handlers.items()
        edge._method_handlers = {path: handler._replace(**methods) for path, handler in handled}
        self._server.add_generic_rpc_handlers(handlers)

    async def _answer(self, request, call):
        self.prompts.append(request.prompt)
        return Envelope.of(pb.GenerateResponse(request_id="one")).data

    async def _answers(self, request, call):
        yield await self._answer(request, call)


@asynccontextmanager
async def proxying():
    """Such a server with the methods of our edge, and a channel to it."""
    server = grpc.aio.server()
    ray = Ray(server)
    add_inference(generation_pb2_grpc.InferenceServiceServicer(), ray)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield ray, channel
    finally:
        await server.stop(None)


async def answer_of(channel, method, data):
    path = f"/pilotfish.v1.InferenceService/{method}"
    if method == "Generate":
        return await channel.unary_unary(path)(data)
    return await channel.unary_stream(path)(data).read()


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
async def test_many_entries_are_counted_before_they_are_parsed_and_refused_in_the_words_of_our_own_server(method):
    stops = [""] * (MAX_MIDDLE_BYTES // 2)  # of two bytes each
    data = pb.GenerateRequest(stopping=pb.StoppingParams(stop=stops)).SerializeToString()
    errors = []
    async with proxying() as (ray, proxy), serving() as ours:
        for channel in (proxy, ours.channel):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await answer_of(channel, method, data)
            errors.append(error.value)
    assert not ray.kind.threads
    assert not ray.prompts
    told, wanted = (detail(error, error_details_pb2.BadRequest) for error in errors)
    assert told == wanted
    assert told.field_violations[0].field == "stopping.stop"
    assert {error.code() for error in errors} == {grpc.StatusCode.INVALID_ARGUMENT}


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
async def test_large_messages_are_parsed_beside_the_loop_of_the_proxy(method):
    prompts = ["ab", "a" * (MAX_MIDDLE_BYTES + 1)]
    async with proxying() as (ray, channel):
        for prompt in prompts:
            answer = await answer_of(channel, method, pb.GenerateRequest(prompt=prompt).SerializeToString())
            assert pb.GenerateResponse.FromString(answer).request_id == "one"
    assert ray.prompts == prompts
    assert [thread is threading.current_thread() for thread in ray.kind.threads] == [True, False]


@pytest.mark.parametrize("data", [b"\xff\xff\xff", b"\xff" * (MAX_MIDDLE_BYTES + 1)], ids=["small", "large"])
async def test_bytes_that_are_no_message_are_refused_whatever_their_size(data):
    async with proxying() as (ray, channel):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await answer_of(channel, "Generate", data)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert detail(error.value, error_details_pb2.BadRequest).field_violations[0].field == "request"
    assert not ray.prompts


# ------------------------------------------------------------------------------------------------------------- options


def test_the_stall_limit_is_refused_because_the_proxy_has_none():
    with pytest.raises(ValueError, match="stall_seconds: not supported by Ray's proxy"):
        configured({"stall_seconds": 5.0})


@pytest.mark.parametrize("option", WITHOUT_EFFECT)
def test_options_that_nothing_would_keep_are_refused(option):
    assert option in ServerConfig.model_fields
    with pytest.raises(ValueError, match=option):
        configured({option: "x"})


def test_other_options_are_those_of_serve():
    assert configured({"max_batch_size": 7, "threads": 1}).max_batch_size == 7
    with pytest.raises(ValueError, match="nonsense"):
        configured({"nonsense": 1})
