"""Engines are large and made once per module; here they are let go of."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests import sameness


@pytest.fixture(autouse=True, scope="module")
def engines_end_with_their_module() -> Iterator[None]:
    """Their arenas take gigabytes together."""
    yield
    sameness.random_pair.cache_clear()
    sameness.embedded_pair.cache_clear()
    gc.collect()
