"""Callers of one server: who waits for whom between the queue and the engine, and who is refused."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from types import SimpleNamespace

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.engine.params import SamplingParams
from pilotfish.engine.types import Request
from pilotfish.server.admission.security import AT_ONCE, LONGEST, Refusals
from pilotfish.server.errors import QueueFull
from pilotfish.server.queue import AdmissionQueue
from pilotfish.server.streams.stream import OutputStream
from pilotfish.server.turns import CallerTurns, Estimates
from tests.server.fake_engine import FakeEngine
from tests.server.test_generate import error_of, request
from tests.server.test_order import step
from tests.serving import serving, until

PLACES = 8
FACTS = SimpleNamespace(limits=SimpleNamespace(max_model_len=4096))
TOKENS = {name: [("authorization", f"Bearer {name}-0123456789abcdef")] for name in ("hog", "meek")}


class Front:
    """A queue before an engine that has no places but these."""

    def __init__(self, has_room: bool = False) -> None:
        config = SimpleNamespace(max_batch_size=PLACES, max_output_tokens=None)
        self.engine = SimpleNamespace(config=config, facts=FACTS, has_room=has_room, num_running=PLACES)
        self.queue, self.live = AdmissionQueue(256, 10**6), {}
        self.turns = CallerTurns(self.queue, self.engine, self.live)

    def ask(self, caller: str, due: float = 0.0, n: int = 1) -> OutputStream:
        sampling = SamplingParams(n=n, max_tokens=600, ignore_eos=True)
        asked = Request(request_id=str(len(self.live)), token_ids=(1,), sampling=sampling, caller=caller)
        self.live[asked.request_id] = OutputStream(asked, None, lambda: 0.0)
        self.queue.push(asked, 1, due)
        return self.live[asked.request_id]

    def feed(self, most: int = 1000) -> list[str]:
        """Give the engine what is its turn; return the callers in this order."""
        fed = []
        while len(fed) < most and (caller := self.turns.next()) is not None:
            stream = self.live[self.queue.pop(caller).request_id]
            stream.start()
            self.turns.renew()
            fed.append(caller)
        return fed


def test_a_caller_alone_gets_what_has_room_and_others_what_may_displace_its_outputs() -> None:
    front = Front(has_room=True)
    for _ in range(40):
        front.ask("hog")
    assert front.feed(PLACES) == ["hog"] * PLACES
    front.engine.has_room = False
    assert front.feed() == []
    for _ in range(40):
        front.ask("meek")
    assert front.feed() == ["meek"] * (PLACES // 2), "an equal part; the hog's first outputs have no token yet"


def test_free_places_go_to_whom_the_engine_has_fewest_outputs_of() -> None:
    front = Front(has_room=True)
    for caller, num in (("a", 6), ("b", 4), ("c", 1)):
        for _ in range(num):
            front.ask(caller)
    assert front.feed() == ["a", "b", "c", "a", "b", "a", "b", "a", "b", "a", "a"]


def test_outputs_count_and_not_requests() -> None:
    front = Front(has_room=True)
    front.ask("many", n=4)
    for _ in range(5):
        front.ask("single")
    assert front.feed() == ["many"] + ["single"] * 5
    front.ask("many")
    front.ask("single")
    assert front.feed(1) == ["many"]


def test_the_wait_of_a_caller_is_for_its_own_requests() -> None:
    front, estimates = Front(has_room=True), Estimates()
    estimates.observe(step(1.0, generated=PLACES, running=PLACES))
    for _ in range(PLACES):
        front.ask("hog")
    front.feed()
    front.engine.has_room = False
    for _ in range(40):
        front.ask("hog")
    assert front.turns.outlook("hog", estimates).wait == pytest.approx(6 * 600)
    assert front.turns.least_wait("hog", 1.0, estimates) == pytest.approx(6 * 600)
    assert front.turns.least_wait("hog", -1.0, estimates) == pytest.approx(600), "due before all that wait"
    assert front.turns.least_wait("meek", 1.0, estimates) == front.turns.outlook("meek", estimates).wait == 0.0
    for _ in range(PLACES // 2):
        front.ask("meek")
    assert front.turns.least_wait("meek", 1.0, estimates) == pytest.approx(600), "its part of the places is taken"


seconds_left = st.just(0.0) | st.floats(0.01, 9)  # half of the least float is nothing


@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(0, 0.2)), max_size=200), st.floats(0.1, 9), seconds_left)
def test_refusals_are_delayed_for_callers_that_retry_immediately(asked, retry: float, remaining: float) -> None:
    """The first ones at once, all in the time in which a retry is refused too, and none after its deadline."""
    refusals, now, held = Refusals(), 0.0, defaultdict[str, list[float]](list)
    error = QueueFull("full", bound="requests", retry_seconds=retry)
    for caller, pause in asked:
        now += pause
        held[caller].append(refusals.delay(caller, error, remaining, now))
        assert 0 <= held[caller][-1] <= min(retry, remaining, LONGEST)
    assert all(not any(delays[:AT_ONCE]) for delays in held.values())
    if now < 1:
        assert all(all(delays[AT_ONCE + 21 :]) for delays in held.values() if remaining)
    later = [refusals.delay("a", error, remaining, now + LONGEST + 1.001) for _ in range(AT_ONCE)]
    assert not any(later), "forgotten"


async def test_a_refused_caller_waits_for_its_answer_and_others_do_not(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(Refusals, "delay", lambda _self, *one: asked.append(one) or 60.0)
    (tmp_path / "tokens").write_text("hog hog-0123456789abcdef\nmeek meek-0123456789abcdef\n")
    async with serving(token_file=tmp_path / "tokens", max_requests_per_token=1) as server:
        ask = server.inference.Generate
        refused = asyncio.ensure_future(ask(request(sampling={"n": 2}), metadata=TOKENS["hog"], timeout=100))
        await until(lambda: asked)
        (caller, error, remaining, _), *_ = asked
        assert (caller, error.bound, 0 < remaining <= 100) == ("hog", "live requests", True)
        for name in ("hog", "meek"):
            assert (await ask(request(), metadata=TOKENS[name])).outputs
        invalid = await error_of(ask(request(sampling={"top_p": 2}), metadata=TOKENS["hog"]))
        assert invalid.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert not refused.done()
        refused.cancel()


async def test_a_full_queue_of_one_tenant_refuses_nothing_of_another(tmp_path):
    (tmp_path / "tokens").write_text("hog hog-0123456789abcdef\nmeek meek-0123456789abcdef\n")
    engine = FakeEngine(batch=4)
    bounds = {"max_queue_requests": 16, "max_queue_tokens": 400, "max_queue_seconds": 0.0}
    async with serving(engine, token_file=tmp_path / "tokens", **bounds) as server:
        engine.gate.clear()
        hogs = [
            asyncio.ensure_future(server.inference.Generate(request(), metadata=TOKENS["hog"], timeout=60))
            for _ in range(40)
        ]
        await until(lambda: sum(hog.done() for hog in hogs) >= 40 - 4 - 16)
        server.app.driver.estimates.observe(step(100.0, generated=4, running=4))
        meek = asyncio.ensure_future(server.inference.Generate(request(), metadata=TOKENS["meek"], timeout=60))
        await until(lambda: any("meek" in stream.request.caller for stream in server.app.driver.live()))
        engine.gate.set()
        assert (await meek).outputs
        found = await asyncio.gather(*hogs, return_exceptions=True)
        assert 4 <= sum(not isinstance(one, Exception) for one in found) <= 4 + 16
