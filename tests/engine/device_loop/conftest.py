"""A card that is not there, for engines whose rounds are recorded."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.card import Card, here


@pytest.fixture
def card() -> Iterator[Card]:
    with here() as found:
        yield found
