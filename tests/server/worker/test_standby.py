"""A standby is loaded once, replaced after pauses, taken once, and leaves no process, whatever happens meanwhile."""

from __future__ import annotations

import asyncio

import pytest

from pilotfish.engine.errors import ModelError
from pilotfish.server.errors import EngineCrashed
from pilotfish.server.worker.worker import Standby
from tests.serving import until


class FakeWorker:
    """What a standby needs of a worker."""

    def __init__(self):
        self.loss, self.lost, self.closed = None, asyncio.Event(), 0

    def lose(self):
        self.loss = EngineCrashed("lost")
        self.lost.set()

    async def close(self):
        await asyncio.sleep(0)
        self.closed += 1


class Loads:
    """Each load makes a worker, or fails, as soon as the gate is open."""

    def __init__(self, *, is_open=True, fails=0, error=EngineCrashed):
        self.workers, self.begun, self.fails, self.error = [], 0, fails, error
        self.gate = asyncio.Event()
        if is_open:
            self.gate.set()

    async def __call__(self):
        self.begun += 1
        await self.gate.wait()
        if self.fails:
            self.fails -= 1
            raise self.error("no memory")
        self.workers.append(FakeWorker())
        return self.workers[-1]


class Pauses(list):
    """Short pauses between loads, and how long they should be."""

    async def __call__(self, seconds):
        self.append(seconds)
        await asyncio.sleep(0)


@pytest.mark.parametrize("fails", [0, 1])
async def test_it_is_taken_once_and_as_soon_as_it_is_loaded_and_is_none_if_it_cannot_be(fails):
    loads = Loads(is_open=False, fails=fails)
    standby = Standby(loads)
    taking = asyncio.ensure_future(standby.take())
    await until(lambda: loads.begun == 1)
    assert not taking.done()
    loads.gate.set()
    assert await taking == (None if fails else loads.workers[0])
    assert await standby.take() is None
    await standby.close()
    assert ([worker.closed for worker in loads.workers], loads.begun) == ([0] * (1 - fails), 1)


async def test_one_that_is_lost_again_and_again_is_replaced_after_longer_and_longer_pauses():
    loads, pauses = Loads(), Pauses()
    standby = Standby(loads, pauses)
    for times in range(1, 12):
        await until(lambda: len(loads.workers) == times)  # noqa: B023
        loads.workers[-1].lose()
    await until(lambda: len(loads.workers) == 12)
    assert [worker.closed for worker in loads.workers] == [1] * 11 + [0]
    assert pauses[:3] == [0.5, 1.0, 2.0]
    assert pauses[-1] == 30.0
    await standby.close()
    assert loads.workers[-1].closed == 1


async def test_one_that_cannot_be_loaded_is_tried_again():
    loads, pauses = Loads(fails=2), Pauses()
    standby = Standby(loads, pauses)
    await until(lambda: loads.workers)
    assert pauses == [0.5, 1.0]
    assert await standby.take() is loads.workers[0]
    await standby.close()


async def test_one_that_is_refused_is_not_loaded_again():
    """Each time its weights would take memory that the engine beside it counts on."""
    loads, pauses = Loads(fails=1, error=ModelError), Pauses()
    standby = Standby(loads, pauses)
    await asyncio.wait([standby._keeper], timeout=60)
    assert await standby.take() is None
    await standby.close()
    assert (loads.begun, pauses) == (1, [])


async def test_one_that_is_lost_at_the_moment_it_is_taken_is_closed_once():
    loads = Loads()
    standby = Standby(loads)
    await until(lambda: loads.workers)
    await asyncio.sleep(0)
    loads.workers[0].lose()
    assert await standby.take() is None
    assert loads.workers[0].closed == 1
    await standby.close()
    assert (loads.workers[0].closed, loads.begun) == (1, 1)


@pytest.mark.parametrize("is_loaded", [False, True])
async def test_it_is_closed_whether_it_is_loaded_or_not(is_loaded):
    loads = Loads(is_open=is_loaded)
    standby = Standby(loads)
    await until(lambda: loads.begun)
    await asyncio.sleep(0)
    await standby.close()
    assert [worker.closed for worker in loads.workers] == [1] * is_loaded


async def test_who_stops_waiting_for_it_leaves_it_to_be_closed():
    loads = Loads(is_open=False)
    standby = Standby(loads)
    taking = asyncio.ensure_future(standby.take())
    await until(lambda: loads.begun)
    taking.cancel()
    await asyncio.wait([taking])
    loads.gate.set()
    await until(lambda: loads.workers)
    await standby.close()
    assert loads.workers[0].closed == 1
