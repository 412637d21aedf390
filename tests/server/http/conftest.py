"""One server for all tests of a module that change nothing about it."""

from __future__ import annotations

import pytest
import pytest_asyncio

from tests.server.http import agents
from tests.server.http.interfaces import talking


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_server():
    async with talking() as running:
        yield running


@pytest.fixture
def server(shared_server):
    """The module's server, for tests of the module's loop, with the requests of one test."""
    shared_server.engine.requests.clear()
    yield shared_server
    assert shared_server.engine.free_pages == shared_server.engine.total_pages or shared_server.app.driver.live()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def _saying():
    async with agents.talking() as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def _planning():
    async with agents.talking(agents.planned(agents.PLAN)) as running:
        yield running


@pytest.fixture
def saying(_saying):
    """The module's server for agents' routes, which says a sentence."""
    _saying.engine.requests.clear()
    return _saying


@pytest.fixture
def planning(_planning):
    """The module's server for agents' routes, which reasons, says a sentence and calls a tool."""
    _planning.engine.requests.clear()
    return _planning
