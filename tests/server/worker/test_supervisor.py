"""When an engine that failed begins again, and when it does not."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from pilotfish.server.errors import EngineCrashed
from pilotfish.server.lifecycle import Lifecycle, State
from pilotfish.server.telemetry.metrics import Metrics
from pilotfish.server.worker import supervisor as supervisor_module
from pilotfish.server.worker.supervisor import FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, Supervisor
from tests.server.test_security import Clock
from tests.serving import until


def failed(crashes):
    """The pause after one more failure."""
    crashes.record()
    return crashes.pause()


def test_pauses_grow_and_end():
    clock = Clock()
    crashes = Supervisor(None, None, None, 9, 300.0, clock)
    pauses = [failed(crashes) for _ in range(9)]
    assert pauses[:3] == [0.0, FIRST_PAUSE_SECONDS, 2 * FIRST_PAUSE_SECONDS]
    assert pauses == sorted(pauses)
    assert pauses[-1] == LONGEST_PAUSE_SECONDS
    assert failed(crashes) is None


def test_crashes_are_forgotten_in_time():
    clock = Clock()
    crashes = Supervisor(None, None, None, 2, 60.0, clock)
    for _ in range(10):
        assert failed(crashes) == 0.0
        clock.now += 61.0
    assert failed(crashes) == 0.0
    clock.now += 59.0
    assert failed(crashes) == FIRST_PAUSE_SECONDS
    assert failed(crashes) is None


def test_after_a_step_the_next_restart_is_at_once_and_still_counts():
    crashes = Supervisor(None, None, None, 3, 60.0, Clock())
    for _ in range(3):
        assert failed(crashes) == 0.0
        crashes.record_step()
    assert failed(crashes) is None


def test_crashes_that_a_request_caused_do_not_count():
    crashes = Supervisor(None, None, None, 3, 60.0, Clock())
    assert failed(crashes) == 0.0  # which nobody caused
    crashes.record_step()
    for _ in range(10):
        assert [failed(crashes), failed(crashes)] == [0.0, FIRST_PAUSE_SECONDS]
        crashes.discount(2)
        assert crashes.pause() == 0.0
        crashes.record_step()
    assert [failed(crashes), failed(crashes)] == [0.0, FIRST_PAUSE_SECONDS]
    assert failed(crashes) is None  # the first one still counts


class FakeHost:
    """Fails to restart as often as it is told, and then does, unless `gate` holds it."""

    def __init__(self, *failures):
        self.failures, self.starts = list(failures), 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def restart(self):
        self.starts += 1
        await self.gate.wait()
        if self.failures:
            raise self.failures.pop(0)


async def supervised(host, most=5):
    lifecycle, metrics = Lifecycle(), Metrics(CollectorRegistry())
    await lifecycle.move(State.READY)
    supervisor = Supervisor(host, lifecycle, metrics, most, 60.0)
    await supervisor.lost()
    return supervisor, lifecycle, metrics


async def test_a_restart_that_fails_is_one_more_crash(monkeypatch):
    monkeypatch.setattr(supervisor_module, "FIRST_PAUSE_SECONDS", 0.001)
    host = FakeHost(EngineCrashed("x"), EngineCrashed("y"))
    supervisor, lifecycle, _ = await supervised(host)
    assert await supervisor.revive(asyncio.Event())
    assert host.starts == 3
    host.failures = [EngineCrashed("z")] * 9
    await supervisor.lost()
    assert not await supervisor.revive(asyncio.Event())
    assert lifecycle.state is State.FAILED
    assert host.starts == 5


@pytest.mark.parametrize("while_it", ["pauses", "starts"])
async def test_a_stop_need_not_wait_for_it(while_it):
    host, stopping = FakeHost(), asyncio.Event()
    host.gate.clear()
    supervisor, lifecycle, _ = await supervised(host)
    if while_it == "pauses":
        host.failures = [EngineCrashed("x")] * 9
        host.gate.set()
    reviving = asyncio.ensure_future(supervisor.revive(stopping))
    await until(lambda: host.starts == 1)
    stopping.set()
    async with asyncio.timeout(5):
        assert not await reviving
    assert lifecycle.state is State.RECOVERING


async def test_which_states_follow_which():
    lifecycle = Lifecycle()
    for state in (State.READY, State.RECOVERING, State.READY, State.DRAINING):
        await lifecycle.move(state)
        assert lifecycle.state is state
    for state in (State.READY, State.RECOVERING):
        await lifecycle.move(state)
        assert lifecycle.state is State.DRAINING
    await lifecycle.move(State.FAILED)
    await lifecycle.move(State.READY)
    assert lifecycle.state is State.FAILED
