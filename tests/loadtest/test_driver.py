"""The driver against a whole server around a fake engine: what it notes is what happened."""

from __future__ import annotations

import asyncio
from random import Random

import client
from client import GenerateOptions
from loadtest.arrivals import Arrivals
from loadtest.driver import Run
from loadtest.experiments.overload import full_rate
from loadtest.samples import Outcome, Summary
from loadtest.workload import Ask
from tests.server.fake_engine import FakeEngine
from tests.serving import serving, until

TOKENS = 20


def asks(**fields):
    return lambda random: Ask("ab", GenerateOptions(max_tokens=TOKENS), **fields)


def connect(server):
    return client.AsyncClient(f"127.0.0.1:{server.app.grpc_port}", retry=None)


async def test_an_open_loop_does_not_wait_for_answers():
    engine = FakeEngine(batch=2)
    engine.gate.clear()
    moments = list(Arrivals(200.0).times(0.5, Random(1)))
    async with serving(engine) as server, connect(server) as connection:
        run = Run(connection)
        asyncio.get_running_loop().call_later(1.0, engine.gate.set)
        await run.open_loop(moments, asks(), Random(1))
    assert [s.intended for s in sorted(run.samples, key=lambda s: s.intended)] == moments
    summary = Summary.of(run.samples, run.now())
    assert summary.adds_up
    assert summary.served == len(moments)
    assert summary.tokens == TOKENS * len(moments)
    # Nothing came before the gate was opened, and that counts from the moment a request was meant to be sent.
    assert all(s.time_to_first_token > 1.0 - s.intended - 0.1 for s in run.samples)


async def test_a_closed_loop_lasts_until_a_rate_can_be_told_from_it():
    engine = FakeEngine(batch=2, step_seconds=0.005)
    async with serving(engine) as server, connect(server) as connection:
        run = Run(connection)
        await run.closed_loop(2, 0.0, asks(), Random(1), least=5)
    assert 5 <= len(run.samples) <= 6, "each of two callers ends with the call after which there are enough"
    assert full_rate(run.samples) > 0


async def test_every_end_has_its_outcome():
    engine = FakeEngine(batch=1, step_seconds=0.02)
    async with serving(engine, max_queue_requests=1) as server, connect(server) as connection:
        run = Run(connection)
        endless = Ask("ab", GenerateOptions(max_tokens=2000), patience=1.0)
        first = asyncio.create_task(run.send(endless))
        await until(lambda: engine.num_running)
        late = asyncio.create_task(run.send(Ask("ab", GenerateOptions(max_tokens=TOKENS), deadline=0.3)))
        await until(lambda: server.app.driver.queue)
        refused = await run.send(asks()(Random()))
        served = [await first, await late]
        wrong = await run.send(Ask("ab", GenerateOptions(temperature=-1.0)))
    assert [s.outcome for s in served] == [Outcome.LEFT, Outcome.LATE]
    assert (refused.outcome, refused.status) == (Outcome.REFUSED, "RESOURCE_EXHAUSTED")
    assert refused.retry_seconds > 0
    assert (wrong.outcome, wrong.status) == (Outcome.FAILED, "INVALID_ARGUMENT")
    assert served[0].tokens > 0
    assert len(run.samples) == 4
