"""What stands between Ray and a caller, without Ray: envelopes, Ray's words in ours, options with no effect."""

from __future__ import annotations

import math

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from deploy.ray.edge import REMAINING, _Call, _ours
from deploy.ray.envelope import Envelope, Status, opened
from deploy.ray.replica import WITHOUT_EFFECT, _origin, configured
from engine.errors import InvalidRequest
from pilotfish.v1 import generation_pb2 as pb
from server.config import ServerConfig
from server.errors import QueueFull, Unavailable


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


def test_an_error_that_is_final_names_no_time():
    status = opened(Envelope.refused(InvalidRequest.of("prompt", "is empty")).data)
    assert status.code is grpc.StatusCode.INVALID_ARGUMENT
    assert "grpc-retry-pushback-ms" not in dict(status.trailers)


def test_a_fault_of_ours_says_no_more_than_that():
    status = opened(Envelope.failed().data)
    assert (status.code, status.message) == (grpc.StatusCode.INTERNAL, "internal error")


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
def test_a_replica_hears_how_much_time_is_left_from_the_edge_alone(remaining, seconds):
    call = _Call(Context(remaining))
    assert call.peer() == "somebody"
    assert call.invocation_metadata()[0] == ("a", "b")
    assert _origin(call).remaining() == pytest.approx(seconds, abs=1.0)


@pytest.mark.parametrize("option", WITHOUT_EFFECT)
def test_options_that_nothing_would_keep_are_refused(option):
    assert option in ServerConfig.model_fields
    with pytest.raises(ValueError, match=option):
        configured({option: "x"})


def test_other_options_are_those_of_serve():
    assert configured({"max_batch_size": 7, "threads": 1}).max_batch_size == 7
    with pytest.raises(ValueError, match="nonsense"):
        configured({"nonsense": 1})
