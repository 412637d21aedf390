"""What control has to know of a proposer in order to choose it. Knows no model."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from engine.types import Sequence


class Found(NamedTuple):
    """Drafts that were looked up in earlier text, and the length of the match that led to them, in tokens."""

    tokens: tuple[int, ...] = ()
    match: int = 0


class Traits(NamedTuple):
    """What control knows of one proposer."""

    find: Callable[[Sequence, int], Found] | None = None  # the drafts that it has looked up; None: it makes them
    num_unseen: Callable[[Sequence], int] | None = None  # tokens that it must read before it drafts; None: none
    is_parallel: bool = False  # all its drafts come of one pass
    most: int | None = None  # drafts that it can make in a step; None: any number
