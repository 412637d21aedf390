from __future__ import annotations

import pytest

from tests.client import fake_server


@pytest.fixture
def fake():
    with fake_server.running() as server:
        yield server


@pytest.fixture(params=["sync", "async"])
def kind(request):
    return request.param
