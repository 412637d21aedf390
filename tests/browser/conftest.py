"""One Chromium for the tests of a module, and the page of a server in it."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from functools import partial

import httpx
import pytest
import pytest_asyncio
from playwright.async_api import expect

from tests.browser.chromium import browsing, visiting
from tests.conftest import ENDING
from tests.serving import serving

expect.set_options(timeout=60_000)  # milliseconds, for a busy machine


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser():
    async with browsing() as found:
        yield found


@pytest_asyncio.fixture(loop_scope="module")
async def no_leaked_tasks(browser):
    """What `tests/conftest.py` asks of all tests, on this loop."""
    before = asyncio.all_tasks()
    yield
    left = asyncio.all_tasks() - before - {asyncio.current_task()}
    assert not left or not (await asyncio.wait(left, timeout=ENDING))[1]


@pytest.fixture
def open_page(browser):
    return partial(_open_page, browser)


@asynccontextmanager
async def _open_page(browser, engine=None, window=None, **options):
    """The page of a server, and what its console complains of."""
    async with serving(engine, **options) as server:
        url = f"http://127.0.0.1:{server.app.http_port}/"
        async with visiting(browser, url, **(window or {})) as (page, said), httpx.AsyncClient(base_url=url) as http:
            await expect(page.locator("#server")).to_contain_text("cpu")
            server.http = http
            yield page, said, server
