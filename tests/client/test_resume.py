"""When which request is sent again: laws that need no server and no time."""

from __future__ import annotations

from copy import deepcopy
from itertools import accumulate, pairwise

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from client import DeadlineExceededError, QueueFullError, RequestFailedError, Retry, UnavailableError
from client.errors import closed
from client.resume import Patience, ResumableStream
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


def test_pauses_double_up_to_the_longest():
    waiting = patience(Retry(first_pause=0.5, longest_pause=3.0, resume_attempts=5))
    assert [waiting.pause(LOST) for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    with pytest.raises(UnavailableError) as error:
        waiting.pause(LOST)
    assert error.value is LOST


@pytest.mark.parametrize("drawn", [0.0, 1.0])
def test_the_default_lasts_for_twenty_seconds_at_least_and_a_minute_at_most(drawn):
    waiting = patience(drawn=drawn)
    assert 20 < sum(waiting.pause(LOST) for _ in range(Retry().resume_attempts)) < 60


def test_callers_that_fail_together_come_again_at_different_times():
    assert [patience(drawn=drawn).pause(LOST) for drawn in (0.0, 0.5, 1.0)] == pytest.approx([0.1, 0.15, 0.2])


def test_what_arrives_renews_the_budget():
    waiting = patience(Retry(resume_attempts=2))
    for _ in range(5):
        assert [waiting.pause(LOST), waiting.pause(LOST)] == [0.2, 0.4]
        waiting.renew()


def test_any_number_of_attempts_has_a_pause():
    waiting = patience(Retry(resume_attempts=3000))
    assert {waiting.pause(LOST) for _ in range(3000)} == {0.2, 0.4, 0.8, 1.6, 3.2, 5.0}


def test_the_server_may_ask_for_a_longer_pause_and_not_for_a_shorter_one():
    assert patience().pause(FULL) == 7.0
    assert patience().pause(failed("RESOURCE_EXHAUSTED", retry_seconds=0.01)) == 0.2


def test_without_retries_the_first_error_is_the_last():
    for ask in (patience(None).pause, patience(None).pause_before_resending):
        with pytest.raises(UnavailableError):
            ask(DRAINING)


# --------------------------------------------------------------------------------------------------- the deadline


def test_the_timeout_is_what_is_left_until_the_deadline():
    clock = Clock()
    waiting = patience(deadline=5.0, clock=clock)
    assert waiting.timeout == 5.0
    clock.now += 4.0
    assert waiting.timeout == 1.0
    clock.now += 4.0
    assert waiting.timeout == 0.0
    assert patience().timeout is None


def test_a_pause_leaves_time_for_the_attempt_after_it():
    assert patience(Retry(first_pause=4.0), deadline=5.0).pause(LOST) == 2.5


def test_a_pause_beyond_the_deadline_is_not_waited_for():
    with pytest.raises(DeadlineExceededError, match="RESOURCE_EXHAUSTED: full"):
        patience(deadline=5.0).pause(FULL)
    with pytest.raises(DeadlineExceededError):
        patience(deadline=0.0).pause(LOST)


# ------------------------------------------------------------------------------------------- nothing has arrived yet


def test_an_address_without_a_server_is_reported_at_once():
    with pytest.raises(UnavailableError):
        patience().pause_before_resending(LOST)


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


def test_before_anything_arrives_the_request_is_the_callers():
    request = pb.GenerateRequest(prompt="x")
    stream = ResumableStream(request, patience())
    assert stream.next_request() == request
    assert stream.pause_after(DRAINING) is not None
    assert stream.next_request() == request


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


def test_of_an_output_that_has_ended_the_end_is_enough():
    resume = begun(5, sampling=pb.SamplingParams(n=2)).next_request().resume
    assert [(o.index, list(o.token_ids), o.finished) for o in resume.outputs] == [
        (0, [10, 11, 12], False),
        (1, [], True),
    ]


def test_text_that_was_held_back_until_the_end_is_told():
    tails = [[o.tail for o in begun(k).next_request().resume.outputs] for k in (6, 7)]
    assert tails == [[False, False], [True, False]]


def test_only_calls_that_brought_something_count_as_interruptions():
    stream, counts = begun(2), []
    for messages in ((), SCRIPT[2:3], (), (), SCRIPT[3:4]):
        counts.append(stream.next_request().resume.interruptions)
        receive(stream, messages)
    assert [*counts, stream.next_request().resume.interruptions] == [0, 0, 1, 1, 1, 2]


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


@pytest.mark.parametrize("code", ["UNAVAILABLE", "CANCELLED"])
def test_an_interrupted_stream_goes_on(code):
    assert begun().pause_after(failed(code)) == 0.2


@pytest.mark.parametrize(
    "code", ["INTERNAL", "ABORTED", "DEADLINE_EXCEEDED", "FAILED_PRECONDITION", "ALREADY_EXISTS", "RESOURCE_EXHAUSTED"]
)
def test_a_stream_that_failed_ends(code):
    with pytest.raises(RequestFailedError):
        begun().pause_after(failed(code, retry_seconds=0.1))


PASSING = ("UNAVAILABLE", "CANCELLED", "FAILED_PRECONDITION", "NOT_FOUND", "ALREADY_EXISTS")


@pytest.mark.parametrize("code", [*PASSING, "INVALID_ARGUMENT", "UNIMPLEMENTED"])
def test_who_cannot_continue_it_now_is_asked_again(code):
    stream = begun()
    stream.next_request()
    assert stream.pause_after(failed(code)) == 0.2


def test_a_full_queue_is_waited_for_as_told_and_a_request_too_large_is_not():
    stream = begun()
    stream.next_request()
    assert stream.pause_after(failed("RESOURCE_EXHAUSTED", retry_seconds=2.5)) == 2.5
    with pytest.raises(RequestFailedError):
        stream.pause_after(failed("RESOURCE_EXHAUSTED"))


@pytest.mark.parametrize("code", ["INTERNAL", "DEADLINE_EXCEEDED", "UNAUTHENTICATED", "PERMISSION_DENIED"])
def test_what_no_other_server_would_answer_otherwise_is_final(code):
    stream = begun()
    stream.next_request()
    with pytest.raises(RequestFailedError):
        stream.pause_after(failed(code))


def test_a_status_after_the_last_end_changes_nothing():
    assert begun(len(SCRIPT), sampling=pb.SamplingParams(n=2)).pause_after(failed("INTERNAL")) is None


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
