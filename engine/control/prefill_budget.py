"""How many tokens of prompts a step may read without taking longer than a bound. Knows numbers only.

    seconds of a step = seconds of decoding, by how many decode + seconds per token of prompts * tokens of prompts

The first is known from steps that read nothing, the second from what the others took beyond it. Where decoding is not
what it was, the second is wrong by just as much as makes the next step of that size right all the same.
"""

from __future__ import annotations

import math
import sys

from engine.params import MAX_NUM_DRAFT

_AIM = 0.9  # of the bound: the context grows with every chunk, and no two steps take the same
_ALONE = 4.0  # times the bound for a step that no other sequence waits for: larger chunks cost less per token
_NEW = 0.5  # weight of the newest step
_MOST = 4.0  # times what was expected counts as that: one stall is no new machine
_WORTH = 0.55  # of the most tokens per second, where steps are to be short
_DOUBT = 0.998  # per step, of a time that is too long to be worth it: one stall is not the last word
_LEAST = 1e-9  # seconds per token
_FEW = 2  # tokens that a step may read and still tell what decoding takes: where that alone is too long, none read more
# Tokens per sequence: a pass of a draft model that is fed more catches up with a prompt. So many has a block of drafts.
_READING = MAX_NUM_DRAFT + 1


class PrefillBudget:
    """Fed by steps. `seconds`: the bound, but for steps whose decoding alone takes more than half of it.

    Such a step may take twice as long as its decoding: prompts are to be read on any machine. `most`: tokens of a pass.
    """

    def __init__(self, seconds: float = math.inf, most: int = sys.maxsize) -> None:
        self._seconds, self._most = _AIM * seconds, most
        self._decoding: dict[int, float] = {}  # seconds of decoding, by how many decode, doubling
        self._per_token: float | None = None  # seconds for a token of a prompt
        self._per_draft_token: float | None = None  # the same of a draft model
        self._fitting = math.inf  # what `tokens` said last
        self._left = math.inf  # seconds that the step under way has for reading
        self._read = 0  # tokens that draft models have caught up with in it

    def tokens(self, decoding: int, *, alone: bool, short: bool = False) -> float:
        """How many fit in a step in which so many decode, at least one; `alone`: it serves a single sequence.

        225 ms to be filled, decoding takes 45, each token 2: 90 tokens. Decoding takes 200: another 200, 100 tokens.
        `short`: reading takes no longer than decoding, or than decoding of one where nobody decodes.
        """
        self._read = 0
        if self._per_token is not None:  # without a measurement no step is bounded
            taken = self._of(decoding)
            seconds = 0.0 if short else _ALONE * self._seconds if alone else self._seconds
            self._left = max(seconds - taken, taken)
            self._fitting = max(1.0, self._left / self._per_token)
        return self._fitting

    def few(self, most: int) -> int:
        """Of `most` that decode, as few as still get most of the tokens per second in a step, so that it is short.

        Powers of two are tried. 64 take 80 ms, 32 take 45 and 16 take 40: 32, until the 40 are doubted and tried again.
        """
        rates = {size: (1 << size - 1) / seconds for size, seconds in self._decoding.items() if size}
        if not rates:
            return most
        least = _WORTH * max(rates.values())
        sizes = range((most - 1).bit_length(), 0, -1)  # of the powers of two below
        worth = [size for size in sizes if rates.get(size, math.inf) >= least]
        unknown = next((size for size in worth if size not in rates), None)
        if unknown is not None:
            return 1 << unknown - 1
        chosen = 1 << worth[-1] - 1 if worth else most
        if chosen > 1:
            self._decoding[(chosen - 1).bit_length()] *= _DOUBT
        return chosen

    def spend(self, tokens: int) -> None:
        """The target reads so many in the step that `tokens` was asked for."""
        if self._per_token is not None:
            self._left -= tokens * self._per_token

    def tokens_of_draft(self, num_sequences: int) -> int:
        """How many one pass of a draft model is fed: of what was written before as many as fit in what is left.

        At least as many as the target may read: they take a draft model less time, so the bound holds nearly. Two per
        sequence are what drafting needs anyway.
        """
        fitting = self._fitting
        if self._per_draft_token is not None:
            fitting = max(fitting, self._left / self._per_draft_token)
        return int(min(self._most, max(0.0, fitting - self._read) + 2 * num_sequences))

    def spend_of_draft(self, num_sequences: int, tokens: int) -> None:
        """A pass of a draft model was fed so many: what it caught up with no other one may read in this step."""
        self._read += max(0, tokens - 2 * num_sequences)

    def learn(self, decoding: int, tokens: int, seconds: float) -> None:
        """A step in which so many decoded and so many tokens of prompts were read took so long."""
        if seconds <= 0:  # a clock that stood still
            return
        size, taken = decoding.bit_length(), self._of(decoding)
        if tokens <= _FEW:
            self._decoding[size] = _mean(self._decoding.get(size), seconds)
        if tokens:
            each = max(0.0, seconds - taken) / tokens
            self._per_token = max(_mean(self._per_token, each) if self._per_token else seconds / tokens, _LEAST)

    def learn_draft(self, num_sequences: int, tokens: int, seconds: float) -> float:
        """The first pass of a draft model fed so many tokens, and drafting took so long: what of it was reading."""
        if tokens <= _READING * num_sequences or seconds <= 0:
            return 0.0
        self._per_draft_token = max(_mean(self._per_draft_token, seconds / tokens), _LEAST)
        return seconds * (1 - 2 * num_sequences / tokens)

    def _of(self, decoding: int) -> float:
        """Seconds of decoding, as far as known: of the number nearest to it. A pass without it costs that of one."""
        if not self._decoding:
            return 0.0
        return self._decoding[min(self._decoding, key=lambda size: abs(size - decoding.bit_length()))]


def _mean(old: float | None, new: float) -> float:
    return new if old is None else old + _NEW * (min(new, _MOST * old) - old)
