"""Where an output is in the text that its caller predicted, and so what may come next. Knows token ids alone.

The output of an edit follows the prediction, leaves it where something was changed, and returns to it further on. Where
the output has left it, the newest tokens are searched for in the prediction; the place with the longest match counts,
and of equal ones the nearest. What was replaced between is remembered, because names are often changed in many places.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from engine.params import MAX_PREDICTED_DRAFTS
from engine.types import Sequence as TokenSequence

_CAUTIOUS = 8  # drafts while the place is not certain
_CERTAIN = 4  # tokens in a row that make it certain
_LONGEST = 32  # a longer match is no better
_MOST_PLACES = 8  # that are compared in each direction
_LONGEST_EDIT = 8  # tokens that are remembered as replaced, and that replace them
_MOST_FOLLOWED = 1024  # tokens in a step, of an output that was continued
_WIDTH = array("I").itemsize


def num_predicted(sequence: TokenSequence, keep: int | None) -> int:
    """Tokens of the prediction that an output has, of which `keep` generated tokens count; None: all.

    It follows from the output alone: the alignment may be behind it, and may have followed tokens that do not count.
    """
    if not sequence.request.prediction:
        return 0
    alignment = TextAlignment(Prediction(sequence.request.prediction))
    kept = sequence.tokens[: None if keep is None else sequence.prompt_len + keep]
    alignment.follow(kept, sequence.prompt_len, most=len(kept))
    return alignment.num_had


class Prediction:
    """A predicted output; shared by all outputs of its request."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = tuple(tokens)
        self._bytes = array("I", self.tokens).tobytes()

    def places(self, pair: Sequence[int], near: int) -> Iterator[int]:
        """Positions just after occurrences of two tokens: the nearest ones from `near` on, and those before it."""
        wanted, start = array("I", pair).tobytes(), near * _WIDTH
        at = self._bytes.find(wanted, max(0, start - 2 * _WIDTH))
        for _ in range(_MOST_PLACES):
            if at < 0:
                break
            if at % _WIDTH == 0:
                yield at // _WIDTH + 2
            at = self._bytes.find(wanted, at + 1)
        at = self._bytes.rfind(wanted, 0, start)
        for _ in range(_MOST_PLACES):
            if at < 0:
                return
            if at % _WIDTH == 0:
                yield at // _WIDTH + 2
            at = self._bytes.rfind(wanted, 0, at + len(wanted) - 1)


class TextAlignment:
    """Follows one output through its prediction.

    Args:
        prediction: the predicted output.
        most: most drafts in a step.
    """

    def __init__(self, prediction: Prediction, most: int = MAX_PREDICTED_DRAFTS) -> None:
        self._prediction, self._text, self._most = prediction, prediction.tokens, most
        self._is_predicted = bytearray()  # of each token of the output: whether the prediction has it
        self._is_had = bytearray(len(self._text))  # of each token of the prediction: whether the output has it
        self._at: int | None = 0  # position of the next token; None: the output has left the prediction
        self._run = _CERTAIN  # tokens in a row that were as predicted
        self._anchor = 0  # where the output left the prediction, or where it is while that is certain
        self._since: list[int] = []  # what the output has had since then
        self._edits: dict[tuple[int, ...], tuple[int, ...]] = {}  # by what was replaced: what replaced it
        self._begun: tuple[int, ...] = ()  # what is replaced by the replacement that the output has begun
        self._rest: tuple[int, ...] = ()  # what is left of that

    @property
    def num_had(self) -> int:
        """Tokens of the prediction that the output has; where one repeats the other, none counts twice."""
        return min(sum(self._is_predicted), sum(self._is_had))

    def follow(self, tokens: Sequence[int], prompt_len: int, most: int = _MOST_FOLLOWED) -> bool:
        """Take what is new of a sequence's tokens, up to `most`; return whether all of them were taken."""
        start = prompt_len + len(self._is_predicted)
        for i in range(start, min(len(tokens), start + most)):
            self._take(tokens, i)
        return len(tokens) == prompt_len + len(self._is_predicted)

    def drafts(self, k: int) -> tuple[int, ...]:
        """What comes next, at most `k` tokens; nothing where the output has left the prediction."""
        most = min(k, self._most if self._is_certain else _CAUTIOUS)
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
        return self._anchor + len(self._since) if len(self._since) < _CERTAIN else None

    def _take(self, tokens: Sequence[int], i: int) -> None:
        """Take the token at `i`."""
        token, at = tokens[i], self._place
        self._since.append(token)
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
            self._come_to(at + 1, 1)
        else:
            self._leave(tokens, i)

    def _come_to(self, at: int, length: int) -> None:
        """The newest `length` tokens are those before `at`."""
        if self._at is None:
            self._remember(at - length, self._since[:-length])
            self._run = 0
        self._is_predicted[-length:] = self._is_had[at - length : at] = b"\1" * length
        self._at, self._run = at, self._run + length
        if self._is_certain:
            self._anchor, self._since = at, []

    def _remember(self, until: int, new: list[int]) -> None:
        """The prediction from the anchor `until` there was replaced by `new`."""
        old = self._text[self._anchor : until]
        if 0 < len(old) <= _LONGEST_EDIT and 0 < len(new) <= _LONGEST_EDIT:
            self._edits[old] = tuple(new)

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
            self._come_to(place, length)

    def _match_length(self, tokens: Sequence[int], end: int, place: int, num_tokens: int) -> int:
        longest = min(_LONGEST, place, num_tokens)
        return next((n for n in range(longest) if tokens[end - 1 - n] != self._text[place - 1 - n]), longest)

    def _replaced_at(self, at: int) -> tuple[int, ...]:
        """What is replaced at a place, as far as is known; nothing in most."""
        if not self._edits:
            return ()
        longest_first = (self._text[at : at + n] for n in range(_LONGEST_EDIT, 0, -1))
        return next((old for old in longest_first if old in self._edits), ())
