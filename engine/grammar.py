"""What the engine needs of structured output: which tokens may come next. Knows no text and no library."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class GrammarState(Protocol):
    """Where one output stands in its structure. After any `advance` it can go back: drafts are tried and taken back.

    A fault of the structure (its limits, a state with no way on) raises GrammarFault; the state is then of no more
    use, and a new one takes its place. An output ends where it cannot go on without what failed, and no other does.
    """

    def fill(self, mask: Tensor) -> None:
        """Write which tokens may come next into `mask`, bool `[vocab]` on the CPU; end tokens where it may end."""
        ...

    def advance(self, tokens: Seq[int]) -> int:
        """Take the longest leading part of `tokens` that fits; how many that are."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Take back the last `num_tokens` that were taken."""
        ...


class Grammar(Protocol):
    """A compiled structure, shared by all requests that ask for it."""

    def start(self) -> GrammarState:
        """The state before the first generated token."""
        ...
