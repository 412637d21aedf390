"""A request that is tried alone after crashes: what its caller asks meanwhile holds, though the engine is ahead."""

from __future__ import annotations

import asyncio
from collections import deque

import pytest
from prometheus_client import CollectorRegistry

from pilotfish.engine.params import SamplingParams
from pilotfish.engine.stats import StepOutput
from pilotfish.engine.types import FinishReason, Request
from pilotfish.server.driver import Driver
from pilotfish.server.lifecycle import Lifecycle, State
from pilotfish.server.queue import AdmissionQueue
from pilotfish.server.telemetry.metrics import Metrics
from pilotfish.server.worker.supervisor import Supervisor
from tests.server.fake_engine import FakeEngine, served
from tests.serving import until


class HostAhead:
    """Its engine is an output ahead of what the driver has read, as one in a process of its own.

    After the first output of each engine, and of each trial, comes the next one of `accidents`.
    """

    has_work = True

    def __init__(self) -> None:
        self.engine = FakeEngine(burst=40)  # so that two outputs clear a request
        self.unread: deque[StepOutput] = deque()
        self.accidents, self.was_read = [], False
        self.added: list[str] = []

    def add(self, request) -> None:
        self.added.append(request.request_id)
        self.engine.add(request)

    def finish(self, request_id, reason, index=None, keep=None) -> None:
        events = self.engine.finish(request_id, reason, index=index, keep=keep)
        self.unread.append(StepOutput(events, None, self.engine.load))

    def drop(self, request_id, reason) -> None:
        self.engine.finish(request_id, reason)
        self.unread = deque(
            output._replace(events=tuple(e for e in output.events if e.request_id != request_id))
            for output in self.unread
        )

    async def turn(self, _):
        await asyncio.sleep(0)
        if self.was_read and self.accidents:
            self.was_read = False
            self.accidents.pop(0)()
        while len(self.unread) < 2:
            self.unread.append(self.engine.step())
        self.was_read = bool(self.unread[0].events)
        return self.unread.popleft()

    def crash(self) -> None:
        raise RuntimeError("crash")

    async def restart(self) -> None:
        self.engine.recover()
        self.unread.clear()


@pytest.mark.parametrize("reason", [FinishReason.CANCELLED, FinishReason.DEADLINE, FinishReason.ABORTED])
async def test_an_end_that_was_asked_for_during_a_trial_outlives_the_trial(reason):
    """Outputs that were made before the engine heard of the end clear the request; then it is not fed again."""
    host, lifecycle, metrics = HostAhead(), Lifecycle(), Metrics(CollectorRegistry())
    supervisor = Supervisor(host, lifecycle, metrics, 50, 300.0)
    driver = Driver(served(host.engine), AdmissionQueue(100, 10**6), supervisor)
    await lifecycle.move(State.READY)
    sampling = SamplingParams(max_tokens=2000, seed=1)
    first, second = (driver.open(Request(request_id=name, token_ids=(5,), sampling=sampling)) for name in "ab")
    for stream in (first, second):
        driver.submit(stream)
    host.accidents = [host.crash, host.crash, lambda: driver.end(first, reason)]
    running = asyncio.create_task(driver.run())
    await until(lambda: first.ended and second.ended)
    assert host.added[:5] == ["a", "b", "a", "b", "a"], "it was tried alone"
    assert not host.accidents
    assert first.outputs[0].num_tokens < 200
    if reason is FinishReason.ABORTED:  # the only end that is read, as an engine tells it
        assert first.outputs[0].finished.reason is reason
    assert second.outputs[0].finished.completion_tokens == 2000
    driver.stop()
    await running
