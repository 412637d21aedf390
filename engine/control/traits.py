"""What control has to know of a proposer in order to choose it. Knows no model."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from engine.types import Sequence


class Found(NamedTuple):
    """Drafts that were looked up, and how many tokens before them are those that came before the place found."""

    tokens: tuple[int, ...] = ()
    match: int = 0


class Traits(NamedTuple):
    """One proposer, to control."""

    find: Callable[[Sequence, int], Found] | None = None  # the drafts that it has looked up; None: it makes them
    num_unseen: Callable[[Sequence], int] | None = None  # tokens that it must read before it drafts; None: it need not
    is_parallel: bool = False  # all its drafts come of one pass
