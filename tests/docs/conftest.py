from __future__ import annotations

import pytest
from rich.console import Console

from examples.demo import running_server


@pytest.fixture(scope="package")
def address():
    """A real server on the embedded pair, as `pilotfish serve` starts it."""
    with running_server(Console(stderr=True)) as where:
        yield where
