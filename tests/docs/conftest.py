from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tests_of(request):
    """The tests of a file, as pytest finds them, with their marks."""
    return lambda name: list(pytest.Module.from_parent(request.session, path=ROOT / name).collect())
