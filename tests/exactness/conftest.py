"""Engines here draft as many tokens as they may, and end with their module.

Ours is imported late: the controller of workers reads this file, too, and needs none of it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

ADAPTIVE = {"tests.exactness.test_options"}  # names the mode in every request; one of its conditions is AUTO


@pytest.fixture(autouse=True, scope="module")
def as_many_drafts_as_may_be(request: pytest.FixtureRequest) -> Iterator[None]:
    """Control takes drafts away where they do not pay, and on tiny models they do not: nothing would be tested."""
    from pilotfish.engine.control.controller import Control

    with pytest.MonkeyPatch.context() as patch:
        if request.module.__name__ not in ADAPTIVE:
            patch.setattr("pilotfish.engine.startup.build.AdaptiveK", lambda *_: Control())
        yield


@pytest.fixture(autouse=True, scope="module")
def engines_end_with_their_module() -> Iterator[None]:
    """Their arenas take gigabytes together."""
    from tests import sameness

    yield
    sameness.random_pair.cache_clear()
    sameness.embedded_pair.cache_clear()
    gc.collect()
