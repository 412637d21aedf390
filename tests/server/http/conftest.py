"""One server for all tests of a module that change nothing about it."""

from __future__ import annotations

import pytest
import pytest_asyncio

from tests.server.http import agents
from tests.server.http.interfaces import talking
from tests.server.test_security import ALICE


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_server():
    async with talking() as running:
        yield running


@pytest.fixture
def server(shared_server):
    """The module's server, for tests of the module's loop, with the requests of one test."""
    shared_server.engine.requests.clear()
    yield shared_server
    assert (
        shared_server.engine.load.free_pages == shared_server.engine.facts.total_pages
        or shared_server.app.driver.live()
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def _agents_server():
    async with agents.talking() as running:
        yield running


@pytest.fixture
def saying(_agents_server):
    """The module's server for agents' routes, which says a sentence until a test lets it say something else."""
    engine = _agents_server.engine
    room = engine.facts.limits.max_model_len
    engine.requests.clear()
    agents.say(_agents_server, agents.SAID)
    yield _agents_server
    engine.max_model_len = room


@pytest.fixture
def planning(saying):
    """The same server, which reasons, says a sentence and calls a tool."""
    agents.say(saying, agents.PLAN)
    return saying


@pytest.fixture
def tokens(tmp_path):
    """A file with the token of one caller."""
    path = tmp_path / "tokens"
    path.write_text(f"alice {ALICE}\n")
    return path
