"""Hidden states of the target, kept by position until a head has used them."""

from __future__ import annotations

from torch import Tensor


class Features:
    """A run of positions of one sequence: `rows[i]` `[hidden]` belongs to position `first + i`.

    Rows of drafts may be stale: the reader passes the number of the sequence's tokens.
    """

    def __init__(self) -> None:
        self.first, self.rows = 0, list[Tensor]()

    @property
    def stop(self) -> int:
        """The position after the last."""
        return self.first + len(self.rows)

    def take(self, start: int, hidden: Tensor) -> bool:
        """Add `hidden` `[n, hidden]` of positions `start` and on, in place of what was there and beyond.

        Returns whether that joined on; if it left a gap, what was before the gap is forgotten.
        """
        joins = self.first <= start <= self.stop
        if joins:
            self.cut(start)
        else:
            self.first, self.rows = start, []
        self.rows.extend(hidden.clone().unbind())  # a copy: the rest of the pass must not live on behind a view
        return joins

    def cut(self, stop: int) -> None:
        """Forget positions `stop` and beyond."""
        del self.rows[max(0, stop - self.first) :]

    def drop(self, count: int) -> None:
        """Forget the first `count` positions: they have been used."""
        del self.rows[:count]
        self.first += count
