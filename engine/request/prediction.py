"""Aligns an output with the prediction of its caller, to draft from it. Uses only token ids.

The output of an edit follows the prediction, leaves it at a change, and returns to it later. After it has left, its
last tokens are searched in the prediction; the longest match counts, and of equal ones the nearest. Replacements are
stored, because names are often changed in many places.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np

from pilotfish.engine.params import MAX_PREDICTED_DRAFTS
from pilotfish.engine.types import FinishReason
from pilotfish.engine.types import Sequence as TokenSequence

_CAUTIOUS = 8  # drafts while the position is uncertain
_CERTAIN = 4  # consecutive matches that make it certain
_LONGEST = 32  # longer matches count equally
_MOST_PLACES = 8  # maximum tokens compared in each direction
_LONGEST_EDIT = 8  # maximum stored tokens of a replaced text and of its replacement


def num_predicted(sequence: TokenSequence, reason: FinishReason, keep: int | None) -> int:
    """The number of the prediction's tokens in an output's first `keep` generated tokens; None: all.

    It depends only on the output; the alignment may be behind, or beyond `keep`. It is 0 for an output that did not
    finish.
    """
    alignment = sequence.alignment
    if alignment is None or reason not in (FinishReason.STOP, FinishReason.LENGTH):
        return 0
    alignment.follow(sequence.tokens, sequence.prompt_len, most=sequence.num_generated)
    return alignment.num_had_of(sequence.num_generated if keep is None else keep)


class Prediction:
    """A predicted output; shared by all outputs of its request."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = tuple(tokens)
        ids = np.array(self.tokens, dtype=np.uint64)
        pairs = ids[:-1] << np.uint64(32) | ids[1:]
        order = np.argsort(pairs, kind="stable")
        self._pairs = array("Q", pairs[order].tobytes())  # sorted
        self._places = array("Q", (order + 2).astype(np.uint64).tobytes())  # positions after each pair, in order

    def places(self, pair: Sequence[int], near: int) -> Sequence[int]:
        """Positions after occurrences of two tokens: the nearest ones from `near` on, and before it."""
        wanted = pair[0] << 32 | pair[1]
        first = bisect_left(self._pairs, wanted)
        last = bisect_right(self._pairs, wanted, first)
        middle = bisect_left(self._places, near, first, last)
        return self._places[max(first, middle - _MOST_PLACES) : min(last, middle + _MOST_PLACES)]


class TextAlignment:
    """Follows one output through its prediction."""

    def __init__(self, prediction: Prediction) -> None:
        self._prediction, self._text = prediction, prediction.tokens
        self._is_predicted = bytearray()  # by token of the output: whether it is in the prediction
        self._is_had = bytearray(len(self._text))  # by token of the prediction: whether it is in the output
        self._num_predicted = self._num_had = 0  # number of true entries
        self._had_by_then = array("I")  # `num_had` after each token of the output
        self._at: int | None = 0  # position of the next token; None: the output has left the prediction
        self._run = _CERTAIN  # consecutive predicted tokens
        self._anchor = 0  # where the output left the prediction, or its position while certain
        self._num_since = 0  # tokens of the output since then
        self._edits: dict[tuple[int, ...], tuple[int, ...]] = {}  # replacements by replaced text
        self._begun: tuple[int, ...] = ()  # text replaced by the current replacement
        self._rest: tuple[int, ...] = ()  # remaining tokens of the current replacement

    @property
    def num_had(self) -> int:
        """Number of the prediction's tokens in the output; repeated tokens count once."""
        return min(self._num_predicted, self._num_had)

    def num_had_of(self, num_tokens: int) -> int:
        """The same for the first tokens of the output, which must have been followed."""
        return self._had_by_then[num_tokens - 1] if num_tokens else 0

    def follow(self, tokens: Sequence[int], prompt_len: int, most: int) -> bool:
        """Process a sequence's new tokens, at most `most`; return whether all were processed."""
        start = prompt_len + len(self._is_predicted)
        for i in range(start, min(len(tokens), start + most)):
            self._take(tokens, i)
            self._had_by_then.append(self.num_had)
        return len(tokens) == prompt_len + len(self._is_predicted)

    def drafts(self, k: int) -> tuple[int, ...]:
        """The predicted next tokens, at most `k`; empty if the output has left the prediction."""
        most = min(k, MAX_PREDICTED_DRAFTS if self._is_certain else _CAUTIOUS)
        at, found = self._place, list(self._rest)
        while at is not None and len(found) < most and at < len(self._text):
            old = self._replaced_at(at)
            found += self._edits[old] if old else self._text[at : at + 1]
            at += len(old) or 1
        return tuple(found[:most])

    @property
    def _is_certain(self) -> bool:
        return self._at is not None and self._run >= _CERTAIN

    @property
    def _place(self) -> int | None:
        """The position of the next token; just after a change, as if each token replaced one."""
        if self._at is not None:
            return self._at
        return self._anchor + self._num_since if self._num_since < _CERTAIN else None

    def _take(self, tokens: Sequence[int], i: int) -> None:
        """Process the token at `i`."""
        token, at = tokens[i], self._place
        self._num_since += 1
        self._is_predicted.append(0)
        if self._rest and token == self._rest[0]:
            self._rest = self._rest[1:]
            return
        if self._rest:  # the output does not follow the current replacement
            del self._edits[self._begun]
            self._rest, at = (), None
        old = () if at is None else self._replaced_at(at)
        if at is not None and old and self._edits[old][0] == token:
            self._begun, self._rest = old, self._edits[old][1:]
            self._at = at + len(old)
        elif at is not None and at < len(self._text) and self._text[at] == token:
            if old:
                del self._edits[old]
            self._come_to(tokens, i, at + 1, 1)
        else:
            self._leave(tokens, i)

    def _come_to(self, tokens: Sequence[int], i: int, at: int, length: int) -> None:
        """Record that the `length` tokens up to `i` match those before `at`."""
        if self._at is None:
            old, new = range(self._anchor, at - length), range(i + 1 - self._num_since, i + 1 - length)
            if 0 < len(old) <= _LONGEST_EDIT and 0 < len(new) <= _LONGEST_EDIT:
                self._edits[self._text[old.start : old.stop]] = tuple(tokens[new.start : new.stop])
            self._run = 0
        self._num_predicted += self._is_predicted.count(0, len(self._is_predicted) - length)
        self._num_had += self._is_had.count(0, at - length, at)
        self._is_predicted[-length:] = self._is_had[at - length : at] = b"\1" * length
        self._at, self._run = at, self._run + length
        if self._is_certain:
            self._anchor, self._num_since = at, 0

    def _leave(self, tokens: Sequence[int], i: int) -> None:
        """The last token is not as predicted: search for the output's new position."""
        self._at, self._run = None, 0
        num_tokens = len(self._is_predicted)
        best = (1, 0, 0)  # length of the match, nearness, position
        if num_tokens > 1:
            for place in self._prediction.places(tokens[i - 1 : i + 1], self._anchor):
                length = self._match_length(tokens, i + 1, place, num_tokens)
                best = max(best, (length, -abs(place - length - self._anchor), place))
        length, _, place = best
        if length > 1:
            self._come_to(tokens, i, place, length)

    def _match_length(self, tokens: Sequence[int], end: int, place: int, num_tokens: int) -> int:
        longest = min(_LONGEST, place, num_tokens)
        return next((n for n in range(longest) if tokens[end - 1 - n] != self._text[place - 1 - n]), longest)

    def _replaced_at(self, at: int) -> tuple[int, ...]:
        """The stored replacement at a position, if any."""
        if not self._edits:
            return ()
        longest_first = (self._text[at : at + n] for n in range(_LONGEST_EDIT, 0, -1))
        return next((old for old in longest_first if old in self._edits), ())
