"""The usual server of these tests: a whole one around a fake engine; and certificates, which take a while to make."""

from __future__ import annotations

import pytest

from tests.server import certificates
from tests.serving import serving


@pytest.fixture(scope="session")
def papers(tmp_path_factory):
    """An authority and what it has signed."""
    return certificates.make(tmp_path_factory.mktemp("papers"))


@pytest.fixture
async def server():
    """The usual one."""
    async with serving() as running:
        yield running
        assert running.engine.free_pages == running.engine.total_pages or running.app.driver.live()
