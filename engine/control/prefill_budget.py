"""How many tokens of prompts a step may read without taking longer than a bound. Knows numbers only."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence as Seq

from engine.control.constants import AIM, ALONE, WORTH
from engine.control.step_time import StepTime


class PrefillBudget:
    """Of one step after another. `seconds`: the bound, but for steps whose decoding alone takes more than half of it.

    Such a step may take twice as long as its decoding: prompts are to be read on any machine. `most`: tokens of a pass.
    """

    def __init__(self, seconds: float = math.inf, most: int = sys.maxsize) -> None:
        self.times = StepTime()  # a scheduler puts that of its control here
        self._seconds, self._most = AIM * seconds, most
        self._fitting = math.inf  # what `tokens` returned for it
        self._left = math.inf  # seconds that it has for reading
        self._read = 0  # tokens that draft models have caught up with in it

    def tokens(self, lengths: Seq[int], *, alone: bool, short: bool = False) -> float:
        """How many fit in a step in which sequences of these lengths decode, at least one token.

        225 ms to be filled, decoding takes 45, each token 2: 90 tokens. Decoding takes 200: another 200, 100 tokens.
        `alone`: the step serves a single sequence. `short`: reading takes no longer than decoding, or than decoding of
        one where nobody decodes.
        """
        self._read = 0
        each = self.times.reading.get(None)
        if each is not None:  # without a measurement no step is bounded
            taken = self.times.plain(lengths)
            seconds = 0.0 if short else ALONE * self._seconds if alone else self._seconds
            self._left = max(seconds - taken, taken)
            self._fitting = max(1.0, self._left / each)
        return self._fitting

    def few(self, most: int) -> int:
        """Of `most` that decode, as few as still get most of the tokens per second in a step, so that it is short.

        Powers of two are tried. 64 take 80 ms, 32 take 45 and 16 take 40: 32.
        """
        rates = [(1 << i) / max(seconds, 1e-9) for i, seconds in enumerate(self.times.by_batch_size(most))]
        return min((1 << i for i, rate in enumerate(rates) if rate >= WORTH * max(rates)), default=most)

    def spend(self, tokens: int) -> None:
        """The target reads so many in the step that `tokens` was asked for."""
        self._left -= tokens * self.times.reading.get(None, 0.0)

    def tokens_of_draft(self, name: str, num_sequences: int) -> int:
        """How many one pass of a proposer's model is fed: of what was written before as many as fit in what is left.

        At least as many as the target may read: they take a draft model less time, so the bound holds nearly. Two per
        sequence are what drafting needs anyway.
        """
        fitting, each = self._fitting, self.times.reading.get(name)
        if each is not None:
            fitting = max(fitting, self._left / each)
        return int(min(self._most, max(0.0, fitting - self._read) + 2 * num_sequences))

    def spend_of_draft(self, num_sequences: int, tokens: int) -> None:
        """A pass of a draft model was fed so many: what it caught up with no other one may read in this step."""
        self._read += max(0, tokens - 2 * num_sequences)
