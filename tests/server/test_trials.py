"""A request that is tried alone after crashes: what its caller asks meanwhile holds, though the engine is ahead."""

from __future__ import annotations

import asyncio
from collections import deque

import pytest
from prometheus_client import CollectorRegistry

from engine.params import SamplingParams
from engine.types import FinishReason, Request
from server.driver import Driver
from server.lifecycle import Lifecycle, State
from server.queue import AdmissionQueue
from server.telemetry.metrics import Metrics
from server.worker.host import TurnOutput
from server.worker.supervisor import Crashes, Supervisor
from tests.server.fake_engine import FakeEngine, served
from tests.serving import until


class HostAhead:
    """Its engine is up to two outputs ahead of what the driver has read, as one in a process of its own."""

    is_hung = False

    def __init__(self) -> None:
        self.engine = FakeEngine(burst=9)
        self.unread: deque[TurnOutput] = deque()
        self.will_crash = False
        self.added: list[str] = []

    @property
    def has_work(self) -> bool:
        return self.engine.has_work or bool(self.unread)

    def add(self, request) -> None:
        self.added.append(request.request_id)
        self.unread.append(TurnOutput(self.engine.add(request), None))

    def finish(self, request_id, reason, index=None, keep=None) -> None:
        self.unread.append(TurnOutput(self.engine.finish(request_id, reason, index=index, keep=keep), None))

    def drop(self, request_id, reason) -> None:
        self.engine.finish(request_id, reason)
        self.unread = deque(
            TurnOutput(tuple(event for event in output.events if event.request_id != request_id), output.stats)
            for output in self.unread
        )

    async def turn(self, wake):
        await asyncio.sleep(0)
        if self.will_crash:
            self.will_crash = False
            raise RuntimeError("crash")
        while len(self.unread) < 2 and self.engine.has_work:
            self.unread.append(TurnOutput(*self.engine.step()))
        if self.unread:
            return self.unread.popleft()
        await wake.wait()
        wake.clear()
        return None

    async def restart(self) -> None:
        self.engine.recover()
        self.unread.clear()


@pytest.mark.parametrize("reason", [FinishReason.CANCELLED, FinishReason.DEADLINE, FinishReason.ABORTED])
async def test_an_end_that_was_asked_for_during_a_trial_outlives_the_trial(reason, monkeypatch):
    """Outputs that were made before the engine heard of the end clear the request; then it is not fed again."""
    host, lifecycle, metrics = HostAhead(), Lifecycle(), Metrics(CollectorRegistry())
    supervisor = Supervisor(host, lifecycle, metrics, Crashes(50, 300.0))
    record_step, crashes = supervisor.record_step, 0

    def after_a_step() -> None:
        nonlocal crashes
        record_step()
        if crashes < 2:
            crashes += 1
            host.will_crash = True
        elif crashes == 2 and host.added == ["a", "b", "a", "b", "a"]:  # it is tried alone
            crashes += 1
            driver.end(first, reason)

    monkeypatch.setattr(supervisor, "record_step", after_a_step)
    driver = Driver(served(host.engine), host, AdmissionQueue(100, 10**6), metrics, lifecycle, supervisor)
    await lifecycle.move(State.READY)
    sampling = SamplingParams(max_tokens=2000, seed=1)
    first, second = (driver.open(Request(request_id=name, token_ids=(5,), sampling=sampling)) for name in "ab")
    for stream in (first, second):
        driver.submit(stream)
    running = asyncio.create_task(driver.run())
    await until(lambda: first.ended and second.ended)
    assert crashes == 3
    assert first.outputs[0].num_tokens < 100
    if reason is FinishReason.ABORTED:  # the only end that is read, as an engine tells it
        assert first.outputs[0].end.finished.reason is reason
    assert second.outputs[0].end.finished.completion_tokens == 2000
    driver.stop()
    await running
