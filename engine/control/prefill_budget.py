"""How many tokens of prompts a step may read without taking longer than a bound. Uses only numbers."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence as Seq

from pilotfish.engine.control.constants import AIM, ALONE
from pilotfish.engine.control.step_time import StepTime


class PrefillBudget:
    """The budget of one step after another. `seconds`: the bound. `most`: maximum number of tokens of a pass.

    A step whose decoding takes more than half of the bound may take twice as long as its decoding, so that prompts are
    read on any machine.
    """

    def __init__(self, seconds: float = math.inf, most: int = sys.maxsize) -> None:
        self.times = StepTime()  # replaced by the scheduler, which shares its control's
        self._seconds, self._most = AIM * seconds, most
        # Of the step that is being planned:
        self._fitting = math.inf  # the tokens that fit
        self._left = math.inf  # seconds that are left for reading
        self._read = 0  # tokens that draft models have read

    def tokens(self, lengths: Seq[int], *, alone: bool, short: bool = False) -> float:
        """Begin a step in which sequences of these lengths decode; returns how many tokens fit, at least one.

        225 ms may be filled, decoding takes 45, each token 2: 90 tokens. Decoding takes 200: another 200, 100 tokens.
        `alone`: the step serves a single sequence. `short`: reading may take as long as decoding; as decoding of one
        sequence, if none decodes.
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
        """How many of `most` sequences decode in a step that is to be short: most tokens per second and second of it.

        Powers of two are tried. 64 take 80 ms, 32 take 45 and 16 take 40: 32. Throughput over delay (Kleinrock 1979)
        gives up at most half of the throughput where each sequence adds the same time.
        """
        powers = [2**i / max(seconds, 1e-9) ** 2 for i, seconds in enumerate(self.times.by_batch_size(most))]
        return 1 << powers.index(max(powers)) if powers else most

    def spend(self, tokens: int) -> None:
        """Subtract the time in which the target reads `tokens` tokens of prompts."""
        self._left -= tokens * self.times.reading.get(None, 0.0)

    def tokens_of_draft(self, name: str, num_sequences: int) -> int:
        """How many tokens one pass of a proposer's model may be fed: two per sequence, and what fits in the time left.

        At least as many as the target may read: a draft model takes less time for them, so the bound nearly holds. Two
        per sequence are what drafting always feeds.
        """
        fitting, each = self._fitting, self.times.reading.get(name)
        if each is not None:
            fitting = max(fitting, self._left / each)
        return int(min(self._most, max(0.0, fitting - self._read) + 2 * num_sequences))

    def spend_of_draft(self, num_sequences: int, tokens: int) -> None:
        """Subtract what a pass of a draft model was fed, except what drafting always feeds."""
        self._read += max(0, tokens - 2 * num_sequences)
