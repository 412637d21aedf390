"""When which request is sent again: laws that need no server and no time."""

from __future__ import annotations

from copy import deepcopy
from itertools import accumulate, pairwise

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotfish.client import DeadlineExceededError, QueueFullError, RequestFailedError, Retry, UnavailableError
from pilotfish.client.errors import closed
from pilotfish.client.resume import Patience, ResumableStream
from pilotfish.v1 import generation_pb2 as pb
from tests.client.fake_replica import FINGERPRINT, MAX_TOKENS, SCRIPT, SEED, SPECULATION, info

LOST = UnavailableError(grpc.StatusCode.UNAVAILABLE, "gone")
DRAINING = UnavailableError(grpc.StatusCode.UNAVAILABLE, "bye", reason="DRAINING")
FULL = QueueFullError(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", retry_seconds=7.0)
INFO = info()


def failed(code: str, retry_seconds: float | None = None) -> RequestFailedError:
    return RequestFailedError(grpc.StatusCode[code], code, retry_seconds=retry_seconds)


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def patience(retry=Retry(), deadline=None, clock=None, drawn=1.0):  # noqa: B008  # frozen
    return Patience(retry, deadline, clock or Clock(), lambda: drawn)


def begun(after=1, waiting=None, **request):
    """A stream that has received so many messages of the script."""
    stream = ResumableStream(pb.GenerateRequest(prompt="x", **request), waiting or patience())
    receive(stream, SCRIPT[:after])
    return stream


def receive(stream, messages, told=INFO):
    """Give the messages of a call to the stream, which has asked for its request."""
    stream.next_request()
    for number, message in enumerate(messages):
        message = deepcopy(message)
        if number == 0 and told is not None:
            message.resume_info.CopyFrom(told)
        stream.take(message)


# ----------------------------------------------------------------------------------------------------- the pauses


def test_pauses_double_up_to_the_longest_however_many_attempts_there_are():
    waiting = patience(Retry(first_pause=0.5, longest_pause=3.0, resume_attempts=2000))
    assert [waiting.pause(LOST) for _ in range(2000)] == [0.5, 1.0, 2.0] + [3.0] * 1997
    with pytest.raises(UnavailableError) as error:
        waiting.pause(LOST)
    assert error.value is LOST


@pytest.mark.parametrize("drawn", [0.0, 1.0])
def test_the_default_lasts_for_twenty_seconds_at_least_and_a_minute_at_most(drawn):
    """Callers that fail together draw different pauses, so that they come again at different times."""
    pauses = [patience(drawn=drawn).pause(LOST) for _ in range(2)]
    assert pauses == [0.1 + 0.1 * drawn] * 2
    waiting = patience(drawn=drawn)
    assert 20 < sum(waiting.pause(LOST) for _ in range(Retry().resume_attempts)) < 60


def test_without_retries_the_first_loss_is_the_last():
    with pytest.raises(UnavailableError):
        Patience(None, None).pause(LOST)


def test_the_server_may_ask_for_a_longer_pause_and_not_for_a_shorter_one():
    assert patience().pause(FULL) == 7.0
    assert patience().pause(failed("RESOURCE_EXHAUSTED", retry_seconds=0.01)) == 0.2


# --------------------------------------------------------------------------------------------------- the deadline


def test_the_timeout_is_what_is_left_until_the_deadline():
    clock = Clock()
    waiting = patience(deadline=5.0, clock=clock)
    timeouts = []
    for _ in range(3):
        timeouts.append(waiting.timeout)
        clock.now += 4.0
    assert timeouts == [5.0, 1.0, 0.0]
    assert patience().timeout is None


def test_a_pause_leaves_time_for_the_attempt_after_it():
    assert patience(Retry(first_pause=4.0), deadline=5.0).pause(LOST) == 2.5


def test_a_pause_beyond_the_deadline_is_not_waited_for():
    with pytest.raises(DeadlineExceededError, match="RESOURCE_EXHAUSTED: full"):
        patience(deadline=5.0).pause(FULL)
    with pytest.raises(DeadlineExceededError):
        patience(deadline=0.0).pause(LOST)


def test_servers_that_drain_are_waited_for_until_one_serves():
    waiting = patience()
    for error in (DRAINING, LOST, closed(), failed("ALREADY_EXISTS")):
        assert waiting.pause_before_resending(error) > 0


@pytest.mark.parametrize("code", ["RESOURCE_EXHAUSTED", "ALREADY_EXISTS", "CANCELLED", "INTERNAL", "NOT_FOUND"])
def test_other_refusals_are_final(code):
    error = failed(code, retry_seconds=0.1)
    with pytest.raises(RequestFailedError) as raised:
        patience().pause_before_resending(error)
    assert raised.value is error


# -------------------------------------------------------------------------------------------------- the next request


def test_a_request_continues_what_arrived_with_the_settings_of_the_first_call():
    asked = pb.GenerateRequest(request_id="me", prompt="x", sampling=pb.SamplingParams(temperature=0.7, n=2))
    asked.stopping.stop.append("def")
    stream = ResumableStream(asked, patience())
    receive(stream, SCRIPT[:4])
    first = pb.ReceivedOutput(index=0, token_ids=[10, 11, 12])
    second = pb.ReceivedOutput(index=1, token_ids=[20, 21, 22])
    wanted = deepcopy(asked)
    wanted.sampling.seed, wanted.stopping.max_tokens = SEED, MAX_TOKENS
    wanted.speculation.CopyFrom(SPECULATION)
    wanted.resume.CopyFrom(pb.Resume(fingerprint=FINGERPRINT, outputs=[first, second]))
    assert stream.next_request() == wanted
    assert asked.WhichOneof("input") == "prompt"
    assert not asked.HasField("resume"), "the caller's message is not changed"


@settings(max_examples=40)
@given(st.lists(st.integers(0, len(SCRIPT)), max_size=6))
def test_however_often_it_is_cut_every_token_is_told(cuts):
    stream = ResumableStream(pb.GenerateRequest(prompt="x", sampling=pb.SamplingParams(n=2)), patience())
    for start, stop in pairwise(accumulate(sorted(cuts), max, initial=0)):
        receive(stream, SCRIPT[start:stop])
    seen = SCRIPT[: max(cuts, default=0)]
    told = {o.index: o for o in stream.next_request().resume.outputs}
    for index, output in told.items():
        tokens = [t for m in seen if m.HasField("delta") and m.delta.index == index for t in m.delta.token_ids]
        assert output.finished == any(m.HasField("finished") and m.finished.index == index for m in seen)
        assert list(output.token_ids) == ([] if output.finished else tokens)
    assert stream.is_complete == (len(seen) == len(SCRIPT))


# ------------------------------------------------------------------------------------------------------ what is final


REFUSED_FOR_NOW = ("FAILED_PRECONDITION", "NOT_FOUND", "INVALID_ARGUMENT", "UNIMPLEMENTED")  # another server may not


@pytest.mark.parametrize("code", [code.name for code in grpc.StatusCode if code.name != "OK"])
def test_which_status_ends_a_stream_that_was_cut_and_which_the_call_that_continues_it(code):
    for has_asked, passing in ((False, ()), (True, (*REFUSED_FOR_NOW, "ALREADY_EXISTS", "RESOURCE_EXHAUSTED"))):
        stream = begun()
        if has_asked:
            stream.next_request()
        if code in ("UNAVAILABLE", "CANCELLED", *passing):
            assert stream.pause_after(failed(code, retry_seconds=0.1)) == 0.2
        else:
            with pytest.raises(RequestFailedError):
                stream.pause_after(failed(code, retry_seconds=0.1))


def test_a_request_that_is_too_large_is_not_sent_again():
    stream = begun()
    stream.next_request()
    with pytest.raises(RequestFailedError):
        stream.pause_after(failed("RESOURCE_EXHAUSTED"))


def test_a_server_that_does_not_say_how_is_not_asked_to_continue():
    stream = ResumableStream(pb.GenerateRequest(prompt="x"), patience())
    receive(stream, SCRIPT[:1], told=None)
    with pytest.raises(UnavailableError):
        stream.pause_after(DRAINING)


@pytest.mark.parametrize("info", [None, pb.ResumeInfo(fingerprint="another")])
def test_a_server_that_begins_anew_is_not_listened_to(info):
    stream = begun(2)
    with pytest.raises(RequestFailedError) as error:
        receive(stream, SCRIPT, told=info)
    assert stream.pause_after(error.value) == 0.2
    assert [list(o.token_ids) for o in stream.next_request().resume.outputs] == [[10, 11], [20]]
