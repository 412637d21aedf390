"""The usual server of these tests: a whole one around a fake engine."""

from __future__ import annotations

import pytest

from tests.serving import serving


@pytest.fixture
async def server():
    """The usual one."""
    async with serving() as running:
        yield running
        assert running.engine.free_pages == running.engine.total_pages or running.app.driver.live()
