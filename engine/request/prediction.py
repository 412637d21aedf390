"""Where an output is in the text that its caller predicted, and so what may come next. Knows only token ids.

The output of an edit follows the prediction, leaves it where something was changed, and returns to it further on. Where
the output has left it, the newest tokens are searched for in the prediction; the place with the longest match counts,
and of equal ones the nearest. What was replaced between is remembered, because names are often changed in many places.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np

from engine.params import MAX_PREDICTED_DRAFTS
from engine.types import FinishReason
from engine.types import Sequence as TokenSequence

_CAUTIOUS = 8  # drafts while the place is not certain
_CERTAIN = 4  # tokens in a row that make it certain
_LONGEST = 32  # a longer match is no better
_MOST_PLACES = 8  # that are compared in each direction
_LONGEST_EDIT = 8  # tokens that are remembered as replaced, and that replace them


def num_predicted(sequence: TokenSequence, reason: FinishReason, keep: int | None) -> int:
    """Tokens of the prediction that an output has, of which `keep` generated tokens count; None: all.

    It follows only from the output, which the alignment may be behind, or have followed beyond `keep`. Of an output
    that did not come to its end none are counted.
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
        self._places = array("Q", (order + 2).astype(np.uint64).tobytes())  # just after each; of equal pairs in order

    def places(self, pair: Sequence[int], near: int) -> Sequence[int]:
        """Positions just after occurrences of two tokens: the nearest ones from `near` on, and those before it."""
        wanted = pair[0] << 32 | pair[1]
        first = bisect_left(self._pairs, wanted)
        last = bisect_right(self._pairs, wanted, first)
        middle = bisect_left(self._places, near, first, last)
        return self._places[max(first, middle - _MOST_PLACES) : min(last, middle + _MOST_PLACES)]


class TextAlignment:
    """Follows one output through its prediction."""

    def __init__(self, prediction: Prediction) -> None:
        self._prediction, self._text = prediction, prediction.tokens
        self._is_predicted = bytearray()  # of each token of the output: whether the prediction has it
        self._is_had = bytearray(len(self._text))  # of each token of the prediction: whether the output has it
        self._num_predicted = self._num_had = 0  # how many of them are
        self._had_by_then = array("I")  # `num_had` after each token of the output
        self._at: int | None = 0  # position of the next token; None: the output has left the prediction
        self._run = _CERTAIN  # tokens in a row that were as predicted
        self._anchor = 0  # where the output left the prediction, or where it is while that is certain
        self._num_since = 0  # tokens that the output has had since then
        self._edits: dict[tuple[int, ...], tuple[int, ...]] = {}  # by what was replaced: what replaced it
        self._begun: tuple[int, ...] = ()  # what is replaced by the replacement that the output has begun
        self._rest: tuple[int, ...] = ()  # what is left of that

    @property
    def num_had(self) -> int:
        """Tokens of the prediction that the output has; where one repeats the other, none counts twice."""
        return min(self._num_predicted, self._num_had)

    def num_had_of(self, num_tokens: int) -> int:
        """The same of the first tokens of the output, which were followed."""
        return self._had_by_then[num_tokens - 1] if num_tokens else 0

    def follow(self, tokens: Sequence[int], prompt_len: int, most: int) -> bool:
        """Take what is new of a sequence's tokens, up to `most`; return whether all of them were taken."""
        start = prompt_len + len(self._is_predicted)
        for i in range(start, min(len(tokens), start + most)):
            self._take(tokens, i)
            self._had_by_then.append(self.num_had)
        return len(tokens) == prompt_len + len(self._is_predicted)

    def drafts(self, k: int) -> tuple[int, ...]:
        """What comes next, at most `k` tokens; nothing where the output has left the prediction."""
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
        """Where the next token is; where the output has just left the prediction, as if each token replaced one."""
        if self._at is not None:
            return self._at
        return self._anchor + self._num_since if self._num_since < _CERTAIN else None

    def _take(self, tokens: Sequence[int], i: int) -> None:
        """Take the token at `i`."""
        token, at = tokens[i], self._place
        self._num_since += 1
        self._is_predicted.append(0)
        if self._rest and token == self._rest[0]:
            self._rest = self._rest[1:]
            return
        if self._rest:  # the replacement that was begun is not what comes
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
        """The `length` tokens up to the one at `i` are those before `at`."""
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
        """The newest token is not as predicted: search where else the output may be."""
        self._at, self._run = None, 0
        num_tokens = len(self._is_predicted)
        best = (1, 0, 0)  # length of the match, nearness, place
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
        """What is replaced at a place, as far as is known; nothing in most."""
        if not self._edits:
            return ()
        longest_first = (self._text[at : at + n] for n in range(_LONGEST_EDIT, 0, -1))
        return next((old for old in longest_first if old in self._edits), ())
