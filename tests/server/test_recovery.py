"""Crashes are put down to requests: who is fed again, who is tried alone, and who is guilty."""

from __future__ import annotations

from itertools import count

from pilotfish.engine.params import SamplingParams
from pilotfish.engine.types import Request, TokenEvent
from pilotfish.server.recovery import CLEARING_TOKENS, Recovery
from pilotfish.server.streams.stream import OutputStream


def streams(*names, n=1):
    return [
        OutputStream(Request(request_id=name, token_ids=(1,), sampling=SamplingParams(n=n)), None, count().__next__)
        for name in names
    ]


def emit(stream, tokens, index=0):
    event = TokenEvent(request_id=stream.request_id, index=index, token_ids=(5,) * tokens, from_draft=(False,) * tokens)
    stream.push(event)


def fed(recovery):
    return [stream.request_id for stream in recovery.next()[1]]


def test_after_two_in_a_row_each_is_tried_alone_until_it_has_got_further():
    recovery, (a, b, new) = Recovery(), streams("a", "b", "new")
    assert recovery.crashed([a, b]) is None
    assert fed(recovery) == ["a", "b"]  # together, in their order
    assert not recovery.is_trying
    assert fed(recovery) == []
    recovery.crashed([a, b, new])
    assert fed(recovery) == ["a"]
    assert recovery.is_trying
    emit(a, CLEARING_TOKENS - 1)
    assert recovery.next() == (None, ())
    emit(a, 1)
    acquitted, tried = recovery.next()
    assert (acquitted, tried) == (a, (b,))
    emit(b, CLEARING_TOKENS)
    assert recovery.next() == (None, (new, a))  # b runs already
    assert not recovery.is_trying


def test_who_fails_alone_twice_is_guilty_and_the_others_go_on():
    recovery, (a, poison) = Recovery(), streams("a", "poison")
    for _ in range(2):
        assert recovery.crashed([a, poison]) is None
        running = recovery.next()[1]
    assert running == (a,)
    emit(a, CLEARING_TOKENS)
    assert recovery.next() == (a, (poison,))
    assert recovery.crashed([poison]) is None
    assert recovery.next() == (None, (poison,))
    assert recovery.crashed([poison]) is poison
    assert recovery.num_crashes(poison) == 4
    recovery.forget(poison)
    assert fed(recovery) == ["a"]


def test_who_gets_further_between_two_crashes_is_no_suspect():
    recovery, (a,) = Recovery(), streams("a")
    for _ in range(5):
        assert recovery.crashed([a]) is None
        assert fed(recovery) == ["a"]
        emit(a, CLEARING_TOKENS)


def test_every_output_has_to_get_further():
    recovery, (a, b) = Recovery(), streams("a", "b", n=2)
    recovery.crashed([a, b])
    fed(recovery)
    for stream in (a, b):
        emit(stream, CLEARING_TOKENS, index=0)
    emit(b, CLEARING_TOKENS, index=1)
    recovery.crashed([a, b])
    assert fed(recovery) == ["a"]  # the only suspect


def test_who_ends_or_is_taken_away_does_not_come_back():
    recovery, (a, b) = Recovery(), streams("a", "b")
    recovery.crashed([a, b])
    assert recovery.take(a)
    assert not recovery.take(a)
    recovery.forget(b)
    assert fed(recovery) == []


def test_a_trial_ends_with_its_request():
    recovery, (a, b) = Recovery(), streams("a", "b")
    for _ in range(2):
        recovery.crashed([a, b])
        recovery.next()
    recovery.forget(a)
    assert fed(recovery) == ["b"]
