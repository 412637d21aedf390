"""A row of logits, in the engine's words. Knows no tensor."""

from __future__ import annotations

from typing import NamedTuple

from engine.sampling.noise import Stream
from engine.types import Sequence


class LogitsRow(NamedTuple):
    """The token after all of `sequence` and the drafts `before` is to be drawn from `stream`."""

    sequence: Sequence
    before: tuple[int, ...]
    stream: Stream

    @property
    def position(self) -> int:
        """Where that token goes: absolute, from 0."""
        return len(self.sequence.tokens) + len(self.before)
