"""Streams of every option while the engine dies, and while a replica does: in short, as `make survive` does it."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from random import Random

import pytest

from loadtest.experiments import survival
from loadtest.experiments.hostile import CALLS, SIZE
from loadtest.experiments.restart import restarts
from loadtest.process import ServerProcess

pytestmark = pytest.mark.timeout(300)  # servers of their own, on a machine that may be busy


@pytest.fixture(scope="module")
def replicas(tmp_path_factory):
    logs = tmp_path_factory.mktemp("logs")
    with ExitStack() as running:
        yield [running.enter_context(ServerProcess(*survival.OPTIONS, log=logs / name)) for name in "ab"]


@pytest.fixture(scope="module")
def alone(replicas):
    """What each stream gives when nothing dies."""
    return asyncio.run(survival.undisturbed([one.address for one in replicas], replicas[0].http_address, print))


@pytest.mark.slow
def test_a_stream_pauses_and_goes_on_when_its_engine_dies(replicas):
    found = asyncio.run(restarts(replicas[0], 1, Random(0), print))
    assert [pause > 0 for pause in found.seconds] == [True]


@pytest.mark.slow
def test_every_stream_is_as_undisturbed_when_the_engine_dies(replicas, alone):
    found = asyncio.run(survival.engine_deaths(replicas[0], alone, 2, Random(0)))
    assert not list(found.problems())


@pytest.mark.slow
def test_every_stream_is_as_undisturbed_when_a_replica_is_killed_and_when_it_is_rolled(replicas, alone):
    found = asyncio.run(survival.replica_deaths(replicas, alone, 0.0, 2.0, Random(0)))
    assert found.kills == 2
    assert not list(found.problems())


def test_hostile_calls_are_as_large_as_the_limit_lets_through():
    assert len(CALLS) > 60
    for name, call in CALLS.items():
        assert 0.5 * SIZE < len(call.make()) <= 4 << 20, name
