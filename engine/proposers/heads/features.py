"""Hidden states of the target, stored by position until a head has used them."""

from __future__ import annotations

import torch
from torch import Tensor


class Features:
    """Consecutive positions of one sequence: row i of `rows` has position `first + i`; `stop` is the end.

    Rows of rejected drafts are stale; the reader ignores them.
    """

    def __init__(self) -> None:
        self.first, self.stop, self._parts = 0, 0, list[Tensor]()

    @property
    def rows(self) -> Tensor:
        """All of them, `[n, hidden]`; `[0]` if there are none."""
        if len(self._parts) > 1:
            self._parts = [torch.cat(self._parts)]
        return self._parts[0] if self._parts else torch.empty(0)

    def take(self, start: int, hidden: Tensor) -> bool:
        """Add `hidden` `[n, hidden]` of positions from `start`, replacing rows there and beyond.

        Returns whether the rows are contiguous; after a gap, earlier rows are dropped.
        """
        joins = self.first <= start <= self.stop
        if joins:
            self.cut(start)
        else:
            self.first, self.stop, self._parts = start, start, []
        self._parts.append(hidden.clone())  # a copy, because a view would keep the whole pass alive
        self.stop += len(hidden)
        return joins

    def cut(self, stop: int) -> None:
        """Drop positions from `stop`."""
        spare = self.stop - max(stop, self.first)
        self.stop -= max(0, spare)
        while spare > 0:
            last = self._parts.pop()
            if len(last) > spare:
                self._parts.append(last[:-spare])
            spare -= len(last)

    def drop(self, count: int) -> None:
        """Drop the first `count` positions after use."""
        left = self.rows[count:]
        self.first, self._parts = self.first + count, [left] if len(left) else []
