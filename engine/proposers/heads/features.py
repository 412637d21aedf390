"""Hidden states of the target, kept by position until a head has used them."""

from __future__ import annotations

import torch
from torch import Tensor


class Features:
    """A run of positions of one sequence: row i of `rows` belongs to position `first + i`; `stop` is the one after it.

    Rows of drafts that were not kept are stale: the reader cuts them off or does not look at them.
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
        """Add `hidden` `[n, hidden]` of positions `start` and on, in place of what was there and beyond.

        Returns whether that joined on; if it left a gap, what was before the gap is forgotten.
        """
        joins = self.first <= start <= self.stop
        if joins:
            self.cut(start)
        else:
            self.first, self.stop, self._parts = start, start, []
        self._parts.append(hidden.clone())  # the rest of the pass must not live on behind a view
        self.stop += len(hidden)
        return joins

    def cut(self, stop: int) -> None:
        """Forget positions `stop` and beyond."""
        spare = self.stop - max(stop, self.first)
        self.stop -= max(0, spare)
        while spare > 0:
            last = self._parts.pop()
            if len(last) > spare:
                self._parts.append(last[:-spare])
            spare -= len(last)

    def drop(self, count: int) -> None:
        """Forget the first `count` positions: they have been used."""
        left = self.rows[count:]
        self.first, self._parts = self.first + count, [left] if len(left) else []
