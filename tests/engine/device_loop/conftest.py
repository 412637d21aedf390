"""A card that is not there, for engines whose rounds are recorded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.card import Card


@pytest.fixture
def card() -> Iterator[Card]:
    from tests.card import here  # late: Triton asks when it is first imported whether it interprets (tests/conftest.py)

    with here() as found:
        yield found
