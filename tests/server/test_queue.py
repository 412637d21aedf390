"""The queue against a sorted list: order, bounds, and the count of tokens."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pilotfish.engine.types import Request
from pilotfish.server.errors import QueueFull
from pilotfish.server.queue import SERVICE_SHARE, AdmissionQueue, Outlook

MAX_REQUESTS, MAX_TOKENS = 5, 100

actions = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.tuples(st.integers(1, 120), st.integers(0, 3))),
        st.tuples(st.just("pop"), st.none()),
        st.tuples(st.just("remove"), st.integers(0, 30)),
    ),
    max_size=60,
)


@settings(max_examples=40)
@given(actions)
@example([("push", (1, 0))] * (MAX_REQUESTS + 1))
def test_it_is_a_bounded_list(steps) -> None:
    queue, model = AdmissionQueue(MAX_REQUESTS, MAX_TOKENS), []
    for i, (action, value) in enumerate(steps):
        if action == "push":
            size, due = value
            fits = len(model) < MAX_REQUESTS and (not model or sum(n for _, n, _ in model) + size <= MAX_TOKENS)
            assert len(queue.ahead(due)) == sum(other <= due for _, _, other in model)
            if fits:
                queue.push(Request(request_id=str(i), token_ids=(1,)), size, due)
                model.append((str(i), size, due))
                model.sort(key=lambda entry: entry[2])  # a stable sort: first come, first served among equals
            else:
                with pytest.raises(QueueFull) as full:
                    queue.push(Request(request_id=str(i), token_ids=(1,)), size, due)
                assert full.value.bound in ("requests", "tokens")
        elif action == "pop" and model:
            assert queue.pop().request_id == model.pop(0)[0]
        elif action == "remove":
            assert queue.remove(str(value)) == any(name == str(value) for name, _, _ in model)
            model = [entry for entry in model if entry[0] != str(value)]
        assert len(queue) == len(model)
        assert queue.num_tokens == sum(n for _, n, _ in model)
        assert all(name in queue for name, _, _ in model)


def test_an_empty_queue_takes_a_request_of_any_size() -> None:
    queue = AdmissionQueue(MAX_REQUESTS, MAX_TOKENS)
    queue.push(Request(request_id="huge", token_ids=(1,)), 10 * MAX_TOKENS, 0.0)
    with pytest.raises(QueueFull, match="the limit is 100"):
        queue.push(Request(request_id="small", token_ids=(1,)), 1, 0.0)


def test_nobody_waits_longer_than_is_bearable_and_who_would_be_first_always_may() -> None:
    queue = AdmissionQueue(MAX_REQUESTS, MAX_TOKENS, max_seconds=2.0)
    slow = Outlook(wait=3.0, service=4.0, retry=5.0)
    queue.push(Request(request_id="first", token_ids=(1,)), 1, 0.0, slow)
    with pytest.raises(QueueFull, match="wait for 3 seconds; the limit is 2") as full:
        queue.require_room("", 1, slow)
    assert (full.value.bound, full.value.retry_seconds) == ("seconds", 5.0)
    queue.require_room("", 1, Outlook(wait=2.0))
    queue.require_room("", 1, Outlook(wait=3.0, service=3.0 / SERVICE_SHARE))  # everything takes long here


def push(queue: AdmissionQueue, caller: str, number: int, size: int = 1) -> bool:
    """Whether there was room."""
    try:
        queue.push(Request(request_id=f"{caller}{number}", token_ids=(1,), caller=caller), size, 0.0)
    except QueueFull:
        return False
    return True


@pytest.mark.parametrize(("max_requests", "max_tokens"), [(60, 10**6), (10**6, 60)])
def test_each_caller_has_room_for_an_equal_part_however_much_others_have_waiting(max_requests, max_tokens) -> None:
    queue = AdmissionQueue(max_requests, max_tokens)
    for callers, part in enumerate((60, 30, 20, 15), 1):
        assert [push(queue, f"caller {callers}", i) for i in range(part + 1)] == [True] * part + [False]
    assert len(queue) == 60 + 30 + 20 + 15, "and what was accepted stays"
    while queue.callers:
        queue.pop(queue.callers[-1])
    assert [push(queue, "alone", i) for i in range(61)] == [True] * 60 + [False]


def test_a_caller_of_whom_nothing_waits_is_not_refused_for_the_wait_of_others() -> None:
    queue, slow = AdmissionQueue(MAX_REQUESTS, MAX_TOKENS, max_seconds=2.0), Outlook(wait=3.0)
    assert push(queue, "hog", 0, MAX_TOKENS)
    with pytest.raises(QueueFull):
        queue.require_room("hog", 1, slow)
    queue.require_room("other", MAX_TOKENS, slow)
