"""Who goes first and who is not taken at all: priorities with ageing, deadlines, and the estimates behind them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import combinations

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotfish.engine.params import SamplingParams
from pilotfish.engine.stats import Forward, StepStats
from pilotfish.engine.types import ReceivedOutput, Request, Resume
from pilotfish.server.driver import PATIENCE_SECONDS
from pilotfish.server.queue import AdmissionQueue
from pilotfish.server.streams.stream import Timeline
from pilotfish.server.turns import Estimates, least_tokens
from pilotfish.v1 import generation_pb2 as pb
from tests.server.fake_engine import FakeEngine
from tests.server.test_generate import collect, error_of, request
from tests.server.test_life import busy, metric
from tests.serving import serving, until


def served_for(estimates, seconds):
    estimates.end(Timeline(arrived=0.0, started=1.0, ended=1.0 + seconds))


def step(seconds, *, prompt=0, generated=0, running=1, decoding=None, expected=(1.0,)):
    """`expected`: seconds of a step without drafts in which 1, 2, 4, ... sequences decode."""
    decoding = running if decoding is None else decoding
    return StepStats(
        forwards=(Forward("verify", decoding, decoding),),
        phase_seconds={"forward": seconds},
        prompt_tokens=prompt,
        decode_seconds=expected,
        prompt_token_seconds=seconds / prompt if prompt else 0.0,
        generated_tokens=generated,
        running=running,
    )


def asked(tokens=4, **sampling):
    return Request(request_id="r", token_ids=(1,) * tokens, sampling=SamplingParams(**sampling))


def work(estimates, request, running=3):
    return estimates.work(request, request.max_len(100_000), running)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


# ------------------------------------------------------------------------------------------------------- estimates


def test_what_is_not_known_takes_no_time():
    estimates = Estimates()
    assert work(estimates, asked(10_000, min_tokens=1000)) == 0.0
    assert estimates.outlook([1.0] * 4, []).retry == 1.0
    for likely in (False, True):
        assert estimates.left([(0, 0, 600)], likely=likely)[0] == 0.0
        assert estimates.wait([5.0], [20.0] * 100, likely=likely) == 0.0


def test_a_place_is_free_after_the_remaining_tokens_of_running_outputs():
    estimates = Estimates()
    estimates.observe(step(2.0, generated=2, running=2))  # two seconds from one token to the next
    for likely in (False, True):
        for num_ahead, tokens in enumerate((10, 10 + 20, 30, 10 + 20 + 20)):
            assert estimates.wait([30.0, 10.0], [20.0] * num_ahead, likely=likely) == pytest.approx(2.0 * tokens)
    assert estimates.wait([600.0, 600.0], [2.0] * 6, likely=True) == pytest.approx(2 * 606), "short ones take little"
    served_for(estimates, 1.0)
    assert estimates.outlook([10.0, 30.0], [20.0]).retry == pytest.approx(30.0), "at most half a minute"
    assert estimates.outlook([1.0, 30.0], [2.0]).retry == pytest.approx(6.0), "told the wait for which it is refused"


def test_an_output_is_likely_to_use_as_much_as_others_did_and_may_use_as_little_as_any():
    estimates = Estimates()
    for tokens in (80, 80, 40, 0):
        estimates.end_output(tokens, 80)
    assert estimates.left([(10, 0, 80)], likely=True)[0] == pytest.approx(80 * 200 / 320 - 10)
    assert estimates.left([(10, 0, 80)], likely=False)[0] == 0.0
    assert estimates.left([(10, 60, 80)], likely=False)[0] == 50.0, "before that it cannot end"


def test_what_is_known_fades_with_time():
    clock = Clock()
    estimates = Estimates(clock)
    for _ in range(64):
        estimates.end_output(600, 600)
        estimates.observe(step(0.1, generated=64, running=64))
    for now, known in ((0, True), (60, True), (120, False)):
        clock.now = now
        assert (estimates.wait([1.0] * 64, [], likely=True) > 0) is known
        assert (estimates.left([(0, 0, 600)], likely=True)[0] > 0) is known
    clock.now = 60
    for _ in range(3):
        estimates.end_output(60, 600)
    assert estimates.left([(0, 0, 600)], likely=True)[0] < 300, "few new ones count more than many old ones"


def test_the_pace_is_that_of_about_as_many_and_at_best_that_of_no_more():
    """As the engine expects of them, times what steps took of late over what it expected."""
    estimates, expected = Estimates(), (1.0, 1.5, 2.0, 3.0, 4.0, 4.5, 5.0)
    estimates.observe(step(10.0, generated=40, running=40, expected=expected))
    assert estimates.wait([10.0], [], likely=True) == pytest.approx(20.0)
    assert estimates.wait([10.0] * 50, [], likely=True) == estimates.wait([10.0] * 50, [], likely=False) == 100.0
    estimates = Estimates()
    estimates.observe(step(5.0, generated=40, running=40, expected=expected))
    estimates.observe(step(1.0, generated=1, running=1, expected=expected))
    assert estimates.wait([10.0], [], likely=True) == pytest.approx(10.0)
    assert estimates.wait([10.0] * 50, [], likely=True) == pytest.approx(50.0)
    assert estimates.wait([10.0] * 50, [], likely=False) == pytest.approx(10.0)


def test_who_reads_a_prompt_beside_others_does_not_make_them_slow():
    estimates = Estimates()
    for _ in range(100):
        estimates.observe(step(1.0, prompt=500, generated=2, running=64, decoding=2))
    assert estimates.wait([10.0, 10.0], [], likely=True) == pytest.approx(10.0)


def test_what_the_prefix_cache_may_have_takes_no_time():
    estimates = Estimates()
    estimates.observe(step(0.5, prompt=500))
    estimates.observe(replace(step(0.5, prompt=500), prefix_lookups=1000, prefix_hits=900))
    assert work(estimates, asked(1000)) == pytest.approx(0.1)


def test_work_is_reading_and_the_tokens_that_are_sure():
    estimates = Estimates()
    estimates.observe(step(0.5, prompt=500))
    for _ in range(100):
        estimates.observe(step(0.03, generated=12, running=4))  # three tokens each
    assert work(estimates, asked(1000)) == pytest.approx(1.0)
    assert work(estimates, asked(1000, min_tokens=11)) == pytest.approx(1.1)
    estimates.observe(replace(step(100.0, prompt=1), prompt_token_seconds=0.001))  # what the engine expects counts
    assert work(estimates, asked(1000)) == pytest.approx(1.0, rel=0.01)


@pytest.mark.parametrize(
    ("sampling", "limits", "tokens"),
    [
        ({}, (4096,), 1),
        ({"max_tokens": 50}, (4096,), 1),
        ({"max_tokens": 50, "min_tokens": 20}, (4096,), 20),
        ({"max_tokens": 50, "ignore_eos": True}, (4096,), 50),
        ({"max_tokens": 50, "ignore_eos": True, "stop": ("x",)}, (4096,), 1),
        ({"max_tokens": 50, "ignore_eos": True, "stop_token_ids": (1,)}, (4096,), 1),
        ({"ignore_eos": True}, (4096,), 128),
        # `max_output_tokens`, or the room in the context, where a request leaves its length open
        ({"ignore_eos": True}, (4096, 32), 32),
        ({"ignore_eos": True}, (4096, 500), 128),
        ({"ignore_eos": True}, (20, None), 16),
    ],
)
def test_only_tokens_that_are_sure_count(sampling, limits, tokens):
    request = asked(**sampling)
    assert least_tokens(request, request.max_len(*limits)) == tokens


def test_what_was_emitted_before_is_read_and_not_generated_again():
    emitted = (ReceivedOutput(token_ids=(1,) * 48), ReceivedOutput(token_ids=(1,) * 30))
    request = replace(asked(ignore_eos=True, max_tokens=50, n=2), resume=Resume(outputs=emitted))
    assert least_tokens(request, request.max_len(4096)) == 20
    ended = replace(request, resume=Resume(outputs=(emitted[0], replace(emitted[1], has_ended=True))))
    assert least_tokens(ended, ended.max_len(4096)) == 2
    enough = replace(asked(min_tokens=20), resume=Resume(outputs=(ReceivedOutput(token_ids=(1,) * 48),)))
    assert least_tokens(enough, enough.max_len(4096)) == 1
    estimates = Estimates()
    estimates.observe(step(0.5, prompt=500))
    assert work(estimates, replace(asked(952), resume=Resume(outputs=emitted))) == pytest.approx(1.0)


# ------------------------------------------------------------------------------------------------------------ order


@settings(max_examples=30)
@given(st.lists(st.tuples(st.floats(0, 5), st.integers(-100, 100)), min_size=2, max_size=20), st.floats(0.1, 2.0))
def test_nobody_is_overtaken_for_ever(arrivals, ageing):
    """Whoever comes `200 * ageing` seconds later goes later, whatever the priorities."""
    queue, now, when = AdmissionQueue(100, 10**6), 0.0, {}
    for i, (gap, priority) in enumerate(arrivals):
        now += gap
        when[str(i)] = now
        queue.push(Request(request_id=str(i), token_ids=(1,)), 1, now + PATIENCE_SECONDS - priority * ageing)
    order = [queue.pop().request_id for _ in arrivals]
    for first, second in combinations(order, 2):
        assert when[first] <= when[second] + 200 * ageing + 1e-6


async def order_of(server, requests, timeouts):
    """The order in which queued requests reach the engine."""
    calls = []
    for i, message in enumerate(requests):
        call = server.inference.GenerateStream(message, timeout=timeouts[i])
        calls.append(asyncio.ensure_future(collect(call)))
        await until(lambda: len(server.app.driver.queue) == i + 1)  # noqa: B023  # awaited before i moves on
    server.engine.gate.set()
    await asyncio.gather(*calls)
    return [r.request_id for r in server.engine.requests[1:]]


FAR = 10 * PATIENCE_SECONDS
ORDERS = {
    "higher priorities, and equals as they came": ({}, [0, 5, -5, 5, 0], [None] * 5, "13042"),
    "who came first, if waiting is worth that much": ({"ageing_seconds": 1e-6}, [-100, 0, 100], [None] * 3, "012"),
    "near deadlines": ({}, [0] * 4, [None, 9.0, FAR, 5.0], "3102"),
}


@pytest.mark.parametrize("first", ORDERS)
async def test_who_goes_first(first):
    config, priorities, timeouts, order = ORDERS[first]
    async with busy(**config) as server:
        requests = [request(request_id=f"{i}", priority=p) for i, p in enumerate(priorities)]
        assert await order_of(server, requests, timeouts) == list(order)


# -------------------------------------------------------------------------------------------------------- deadlines


async def test_a_deadline_that_cannot_be_met_is_refused_at_once():
    async with busy() as server:
        endless = request(stopping=pb.StoppingParams(max_tokens=50, ignore_eos=True))
        waits = asyncio.ensure_future(collect(server.inference.GenerateStream(endless)))
        await until(lambda: server.app.driver.queue)
        server.app.driver.estimates.observe(step(1.0, generated=1))
        error = await error_of(server.inference.Generate(request(), timeout=20))
        assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        assert "estimated wait 50" in error.details()
        assert len(server.app.driver.queue) == 1
        assert metric(server, "admission_rejected_total", reason="deadline") == 1
        server.engine.gate.set()
        await waits


async def test_a_wait_is_estimated_once_until_requests_have_come_or_gone(monkeypatch):
    """However many are refused meanwhile: they would hold up the first tokens of others."""
    async with busy(max_queue_seconds=80.0) as server:
        driver, estimated = server.app.driver, []
        outlook = driver.estimates.outlook
        monkeypatch.setattr(driver.estimates, "outlook", lambda *a: estimated.append(a) or outlook(*a))
        driver.estimates.observe(step(1.0, generated=1))
        endless = request(stopping=pb.StoppingParams(max_tokens=50, ignore_eos=True))
        queued = []
        for _ in range(2):
            queued.append(server.inference.GenerateStream(endless))
            await until(lambda: len(driver.queue) == len(queued))
        before = len(estimated)
        for _ in range(20):
            error = await error_of(server.inference.Generate(endless, timeout=200))
            assert "a request would wait for 100 seconds; the limit is 80" in error.details()
        assert len(estimated) <= before + 1
        queued.pop().cancel()
        await until(lambda: len(driver.queue) == 1)
        queued.append(server.inference.GenerateStream(endless))
        await until(lambda: len(driver.queue) == 2)
        server.engine.gate.set()


PAST = {
    "64 long ones": lambda estimates: [estimates.end_output(600, 600) for _ in range(64)],
    "64 that were cancelled": lambda estimates: [estimates.end_output(0, 400) for _ in range(64)],
}


@pytest.mark.parametrize("past", PAST)
async def test_short_requests_with_a_minute_are_not_refused_for_what_was_before(past):
    """Four times as many as there are places, so that most of them wait for others that are as short."""
    async with serving(FakeEngine(batch=16, step_seconds=0.001)) as server:
        estimates = server.app.driver.estimates
        for _ in range(64):
            served_for(estimates, 62.0)
            estimates.observe(step(0.1, generated=16, running=16))
        PAST[past](estimates)
        two = request(stopping=pb.StoppingParams(max_tokens=2, ignore_eos=True))
        calls = [server.inference.Generate(two, timeout=60) for _ in range(64)]
        assert all(answer.outputs for answer in await asyncio.gather(*calls))


async def test_callers_who_cancel_teach_that_places_become_free():
    engine = FakeEngine(batch=8, step_seconds=0.001)
    async with serving(engine) as server:
        long, estimates = request(stopping=pb.StoppingParams(max_tokens=400)), server.app.driver.estimates
        for _ in range(64):
            estimates.end_output(400, 400)
        for _ in range(8):
            calls = [server.inference.GenerateStream(long) for _ in range(8)]
            for call in calls:
                await call.read()
                call.cancel()
        await until(lambda: not server.app.driver.live())
        assert estimates.left([(0, 0, 400)], likely=True)[0] < 40


async def test_work_that_takes_longer_than_the_deadline_is_refused(server):
    server.app.driver.estimates.observe(step(1.0, generated=1))
    stopping = pb.StoppingParams(max_tokens=100, min_tokens=50)
    error = await error_of(server.inference.Generate(request(stopping=stopping), timeout=10))
    assert "estimated wait 0, service" in error.details()
    assert (await server.inference.Generate(request(), timeout=10)).outputs


async def test_what_is_late_when_its_turn_comes_never_reaches_the_engine():
    async with busy() as server:
        driver = server.app.driver
        late = driver.open(Request(request_id="late", token_ids=(1,)), remaining=0.05)
        driver.submit(late)
        await asyncio.sleep(0.1)
        server.engine.gate.set()
        with pytest.raises(Exception, match="before the request could start"):
            await late.read()
        assert [r.request_id for r in server.engine.requests] == ["first"]
        assert metric(server, "requests_total", finish_reason="deadline") == 1
