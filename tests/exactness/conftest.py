"""Engines here draft as many tokens as they may, and end with their module."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from engine.control.controller import FixedK
from tests import sameness

ADAPTIVE = {"tests.exactness.test_options"}  # names the mode in every request; one of its conditions is AUTO


@pytest.fixture(autouse=True, scope="module")
def as_many_drafts_as_may_be(request: pytest.FixtureRequest) -> Iterator[None]:
    """Control takes drafts away where they do not pay, and on tiny models they do not: nothing would be tested."""
    with pytest.MonkeyPatch.context() as patch:
        if request.module.__name__ not in ADAPTIVE:
            patch.setattr("engine.startup.build.AdaptiveK", lambda *_: FixedK())
        yield


@pytest.fixture(autouse=True, scope="module")
def engines_end_with_their_module() -> Iterator[None]:
    """Their arenas take gigabytes together."""
    yield
    sameness.random_pair.cache_clear()
    sameness.embedded_pair.cache_clear()
    gc.collect()
