"""The place of a row of logits: its sequence, the drafts before it and its random stream. Uses no tensors."""

from __future__ import annotations

from typing import NamedTuple

from engine.sampling.noise import Stream
from engine.types import Sequence


class LogitsRow(NamedTuple):
    """The row from which the token after `sequence` and the drafts `before` is drawn, with noise from `stream`."""

    sequence: Sequence
    before: tuple[int, ...]
    stream: Stream

    @property
    def position(self) -> int:
        """The absolute position of that token, from 0."""
        return len(self.sequence.tokens) + len(self.before)
