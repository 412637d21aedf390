"""Streams of both clients whose server dies, drains or restarts, over a real wire."""

from __future__ import annotations

import asyncio
import itertools
import sys
import threading
import time
from contextlib import ExitStack, closing

import grpc
import pytest

from pilotfish import client
from pilotfish.client import Retry, convert
from tests.client.blocking import blocking
from tests.client.fake_replica import SCRIPT, Fate, continued, replica
from tests.client.fake_server import CLOSING, free_port, full, refusal, unavailable

QUICK = Retry(attempts=1, first_pause=0.01, longest_pause=0.02)  # gRPC itself tries once, so that tests can count
EVENTS = [convert.event(message) for message in SCRIPT]
TWO = {"n": 2, "timeout": 30.0}


@pytest.fixture
def fake():
    with replica() as one:
        yield one


def events_after(*interruptions):
    """The undisturbed events, but for what the ends say: interrupted before so many messages, each time."""
    return [
        convert.event(continued(message, sum(i <= place for i in interruptions))) if message.HasField("finished") else e
        for place, (message, e) in enumerate(zip(SCRIPT, EVENTS, strict=True))
    ]


# ----------------------------------------------------------------------------------------------------- interruptions


@pytest.mark.parametrize("status", [unavailable(), unavailable("DRAINING"), CLOSING], ids=["lost", "bye", "cut"])
def test_a_stream_survives_its_server_wherever_it_is_cut(kind, fake, status):
    with blocking(kind, fake.address, retry=QUICK) as connection:
        for messages in range(1, len(SCRIPT) + 1):
            fake.requests.clear()
            fake.fates = [Fate(messages, status)]
            assert list(connection.stream("x", **TWO)) == events_after(messages)
            assert len(fake.requests) == (2 if messages < len(SCRIPT) else 1), "nothing was left to ask for"


def test_a_stream_survives_any_number_of_servers(kind, fake):
    """More than the budget has attempts: each brings something."""
    fake.fates = [Fate(1) for _ in SCRIPT]
    with blocking(
        kind, fake.address, retry=Retry(first_pause=0.01, longest_pause=0.01, resume_attempts=2)
    ) as connection:
        events = list(connection.stream("x", **TWO))
    assert events == events_after(*range(1, len(SCRIPT)))
    assert [r.resume.interruptions for r in fake.requests] == [0, *range(len(SCRIPT) - 1)]


def refused(*codes):
    return [Fate(0, refusal(grpc.StatusCode[code])) for code in codes]


@pytest.mark.parametrize(
    ("fates", "interruptions"),
    [
        ([Fate(3), Fate(0), Fate(0), Fate(2), Fate(0)], [3, 5]),  # who is lost before it sends anything changes nothing
        ([Fate(2), *refused("FAILED_PRECONDITION", "NOT_FOUND")], [2]),
        ([Fate(2), *refused(*["ALREADY_EXISTS"] * 3)], [2]),
        ([Fate(2), Fate(5, None, is_old=True), Fate(8, is_old=True)], [2]),
    ],
    ids=["lost at once", "another model", "still live elsewhere", "too old to continue, so they begin anew"],
)
def test_whatever_becomes_of_its_calls_a_stream_goes_on_with_the_first_that_continues_it(
    kind, fake, fates, interruptions
):
    fake.fates = list(fates)
    with blocking(kind, fake.address, retry=QUICK) as connection:
        assert list(connection.stream("x", request_id="me", **TWO)) == events_after(*interruptions)
    assert len(fake.requests) == len(fates) + 1
    assert {(request.request_id, request.prompt) for request in fake.requests} == {("me", "x")}


def test_other_servers_continue_what_a_dead_one_began(kind):
    """One of the two that are left has another model."""
    ports = [free_port(), free_port()]
    with ExitStack() as life, ExitStack() as others:
        one = life.enter_context(replica(always=Fate(2, None)))
        addresses = [one.address, *(f"127.0.0.1:{port}" for port in ports)]
        with blocking(kind, addresses) as connection:
            streams = [connection.stream("x", **TWO) for _ in range(3)]
            begun = [[next(events), next(events)] for events in streams]
            others.enter_context(replica(ports[0], fingerprint="other"))
            third = others.enter_context(replica(ports[1]))
            life.close()
            for first, events in zip(begun, streams, strict=True):
                assert [*first, *events] == events_after(2)
    assert len(third.requests) == 3


# ---------------------------------------------------------------------------------------------------------- the end


def test_the_budget_ends_and_the_error_is_the_last_one(kind, fake):
    fake.fates, fake.always = [Fate(2)], Fate(0)
    retry = Retry(attempts=1, first_pause=0.01, longest_pause=0.02, resume_attempts=4)
    with blocking(kind, fake.address, retry=retry) as connection:
        events = connection.stream("x", **TWO)
        assert [next(events), next(events)] == EVENTS[:2]
        with pytest.raises(client.UnavailableError, match="gone"):
            next(events)
    assert len(fake.requests) == 5


def test_a_deadline_holds_for_all_calls_together(kind, fake):
    fake.fates, fake.always = [Fate(2)], Fate(0)
    retry = Retry(attempts=1, first_pause=0.05, longest_pause=0.1, resume_attempts=1000)
    with blocking(kind, fake.address, retry=retry) as connection, pytest.raises(client.DeadlineExceededError):
        list(connection.stream("x", n=2, timeout=0.6))
    assert len(fake.deadlines) > 2
    assert fake.deadlines[-1] < fake.deadlines[0] / 2  # each call has what is left, as far as servers can measure it


# ------------------------------------------------------------------------------------------ nothing has arrived yet


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_that_drains_is_asked_again_until_its_successor_is_there(kind, fake, stream):
    fake.fates = [Fate(0, unavailable("DRAINING"))] * 5 + [Fate(0)] * 3 + [Fate(0, unavailable("STARTING"))] * 2
    with blocking(kind, fake.address, retry=QUICK) as connection:
        assert list(connection.stream("x", **TWO)) == EVENTS if stream else connection.generate("x")
    assert len(fake.requests) == 11
    assert not any(request.HasField("resume") for request in fake.requests)


@pytest.mark.parametrize("stream", [False, True])
def test_an_address_without_a_server_is_reported_soon(kind, stream):
    with blocking(kind, "127.0.0.1:1") as connection:
        began = time.monotonic()
        with pytest.raises(client.UnavailableError):
            list(connection.stream("x")) if stream else connection.generate("x")
    assert time.monotonic() - began < 5.0


# -------------------------------------------------------------------------------------------------- who stops asking


def pausing(fake):
    """Let the next stream break after two messages, and no server continue it."""
    fake.fates, fake.always = [Fate(2)], Fate(0, full(600.0))


def test_closing_the_client_ends_a_pause(fake):
    pausing(fake)
    connection = client.Client(fake.address, retry=QUICK)
    events = connection.stream("x")
    assert [next(events), next(events)] == EVENTS[:2]
    threading.Timer(0.3, connection.close).start()
    began = time.monotonic()
    with pytest.raises(client.CancelledError):
        next(events)
    assert time.monotonic() - began < 10.0


@pytest.mark.parametrize("is_closed", [True, False], ids=["client closed", "task cancelled"])
async def test_closing_the_async_client_and_cancelling_the_task_end_a_pause(fake, is_closed):
    pausing(fake)
    async with client.AsyncClient(fake.address, retry=QUICK) as connection:
        events = connection.stream("x")
        assert [await anext(events), await anext(events)] == EVENTS[:2]
        following = asyncio.create_task(anext(events))
        await asyncio.sleep(0.3)
        if is_closed:
            await connection.close()
        else:
            following.cancel()
        with pytest.raises(client.CancelledError if is_closed else asyncio.CancelledError):
            async with asyncio.timeout(10.0):
                await following
    assert len(fake.requests) == 2


def test_closing_the_iterator_cancels_the_call_that_continues_it(kind, fake):
    fake.fates = [Fate(2), Fate(1, None)]
    with blocking(kind, fake.address, retry=QUICK) as connection:
        with closing(connection.stream("x", **TWO)) as events:
            assert [next(events) for _ in range(3)] == EVENTS[:3]
            assert not fake.ended[1].is_set()
        assert fake.ended[1].wait(5)


# ------------------------------------------------------------------------------------------------------------- Ctrl-C


def interrupt_at(number):
    """A trace function of this thread that raises KeyboardInterrupt at its call of this number, as Ctrl-C does."""
    calls = itertools.count()

    def trace(frame, *_):
        # No lock of Python's survives an interrupt in the instant before `__exit__` releases it.
        if frame.f_code.co_name != "__exit__" and next(calls) == number:
            sys.settrace(None)
            raise KeyboardInterrupt

    return trace


def interrupted(address, number):
    """A client whose stream was interrupted, and its events; None if the stream had fewer calls."""
    connection = client.Client(address)
    try:
        sys.settrace(interrupt_at(number))
        events = list(connection.stream("x"))
        return connection, None if sys.gettrace() is None else events  # else lost in a destructor
    except KeyboardInterrupt:
        return connection, None
    finally:
        sys.settrace(None)


# An interrupt in a destructor is lost, and some confuse a thread of gRPC, which says so and ends.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_client_closes_after_ctrl_c_at_any_call_of_a_stream(fake):
    """gRPC's channel waits for its calls, and one whose thread was not started would never end."""
    for number in itertools.count():
        connection, events = interrupted(fake.address, number)
        closing = threading.Thread(target=connection.close, daemon=True)
        closing.start()
        closing.join(20)
        assert not closing.is_alive(), f"interrupted at call {number}"
        if events is not None:
            break
    assert (number > 30, events) == (True, EVENTS)
