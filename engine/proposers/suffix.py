"""SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975): what followed the longest matches before, by frequency.

Looks in the request itself (prompt and output) and in past outputs of the same tenant. Drafts can never change an
output, so sharing past outputs reveals no text; but a draft that is kept makes a step faster, and time can be
measured. So tenants (`Request.cache_salt`) never share.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple
from weakref import WeakKeyDictionary

from engine.control.goodput import Found
from engine.proposers.base import Lookup
from engine.types import Sequence

Pair = tuple[int, int]

_MOST_READ = 256  # tokens of a sequence's own text in a step: they take a millisecond or two
_MOST_TENANTS = 1024  # whose past outputs are kept


class Match(NamedTuple):
    """Somewhere in a text: the run in question ended just before `text[end]`."""

    text: list[int]
    end: int


@dataclass(frozen=True, slots=True)
class Guess:
    """Drafts, and how many of them are expected to be kept (the paper's score, section 4.2)."""

    tokens: tuple[int, ...] = ()
    score: float = 0.0
    match: int = 0  # length of the run that was found before


@dataclass(frozen=True, slots=True)
class Rules:
    """How far to trust a match; the defaults were chosen on the embedded pair."""

    shortest: int = 2  # length of a match that is worth anything; the index knows pairs, so at least 2
    longest: int = 16  # a longer match is no better
    reach: float = 2.0  # drafts per token of match: the paper's alpha
    least: float = 0.5  # stop where the estimated chance of being kept falls below this
    most_places: int = 32  # newest occurrences that are counted


class SuffixIndex:
    """Where each pair of tokens ended, oldest first, over growing texts; longer runs are found by looking left.

    It answers what a suffix tree would for runs of two tokens and more, in memory proportional to the tokens, with
    constant work per token and per token forgotten.
    """

    def __init__(self, capacity: int | None = None) -> None:
        self._places: dict[Pair, list[Match]] = {}
        self._order, self._capacity = deque[Pair](), capacity  # of `_places`' entries, oldest first

    def __len__(self) -> int:
        """Places held, one per token."""
        return len(self._order)

    def grow(self, text: list[int], start: int, stop: int | None = None) -> None:
        """Take in `text[start:stop]`. The list is kept, not copied: it may grow, and change no token."""
        for end in range(max(start, 1) + 1, (len(text) if stop is None else stop) + 1):
            pair = (text[end - 2], text[end - 1])
            self._places.setdefault(pair, []).append(Match(text, end))
            self._order.append(pair)
        while self._capacity is not None and len(self) > self._capacity:
            pair = self._order.popleft()
            del self._places[pair][0]
            if not self._places[pair]:
                del self._places[pair]

    def places(self, tokens: list[int], most: int) -> list[Match]:
        """The newest places, at most `most`, where the last pair of `tokens` ended before."""
        if len(tokens) < 2:
            return []
        found = self._places.get((tokens[-2], tokens[-1]), [])
        # The end of the text itself is no earlier occurrence of it.
        elsewhere = (p for p in reversed(found) if p.end < len(p.text))
        return list(islice(elsewhere, most))


def match_length(tokens: list[int], place: Match, longest: int) -> int:
    """How many tokens before `place` are those at the end of `tokens`, up to `longest`."""
    text, end = place
    limit = min(longest, end, len(tokens))
    length = 2  # the pair that led here
    while length < limit and text[end - 1 - length] == tokens[-1 - length]:
        length += 1
    return length


def best_guess(tokens: list[int], places: Seq[Match], k: int, rules: Rules) -> Guess:
    """The continuation with the highest score over all lengths of match."""
    lengths = [match_length(tokens, place, rules.longest) for place in places]
    guesses = [Guess()]
    for shortest in sorted({length for length in lengths if length >= rules.shortest}):
        group = [place for place, length in zip(places, lengths, strict=True) if length >= shortest]
        most = min(k, int(rules.reach * shortest))
        steps = list(islice(_likeliest(tokens, group, rules.least), most))
        guesses.append(Guess(tuple(t for t, _ in steps), sum(chance for _, chance in steps), shortest))
    return max(guesses, key=lambda guess: (guess.score, guess.match))


def _likeliest(tokens: list[int], places: list[Match], least: float) -> Iterator[tuple[int, float]]:
    """Tokens that most often came next, with the estimated chance that all so far are right, while it is high enough.

    A text that ends is continued by the guess itself if it is the request's own: [.. a b a b] goes round.
    """
    chance, made = 1.0, list[int]()
    while places:
        following = [(place, _next(place, len(made), tokens, made)) for place in places]
        counts = Counter(token for _, token in following if token is not None)
        if not counts:
            return
        # Equally frequent ones: the newest place comes first, and a Counter keeps the order of insertion.
        token, count = counts.most_common(1)[0]
        chance *= count / counts.total()
        if chance < least:
            return
        made.append(token)
        yield token, chance
        places = [place for place, t in following if t == token]


def _next(place: Match, offset: int, tokens: list[int], made: list[int]) -> int | None:
    """The token `offset` places on, or None where the text ends."""
    at = place.end + offset
    if at < len(place.text):
        return place.text[at]
    return made[at - len(place.text)] if place.text is tokens else None


class PastOutputs:
    """One index per tenant: at most `capacity` tokens in all, at most a quarter of it for one.

    Within a tenant the oldest tokens go first; beyond the whole, the tenant that was served least recently.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity, self._num_held = capacity, 0
        self._tenants: OrderedDict[str | None, SuffixIndex] = OrderedDict()

    def __len__(self) -> int:
        """Tokens held, over all tenants."""
        return self._num_held

    def of(self, tenant: str | None) -> SuffixIndex:
        """The tenant's own, now the most recently used."""
        index = self._tenants.setdefault(tenant, SuffixIndex(max(1, self._capacity // 4)))
        self._tenants.move_to_end(tenant)
        return index

    def grow(self, tenant: str | None, text: list[int], start: int) -> None:
        """Take in `text` from `start` to its end, and forget what is too much."""
        index = self.of(tenant)
        before = len(index)
        index.grow(text, start)
        self._num_held += len(index) - before
        while self._num_held > self._capacity or len(self._tenants) > _MOST_TENANTS:
            _, gone = self._tenants.popitem(last=False)
            self._num_held -= len(gone)


@dataclass(slots=True)
class _IndexedText:
    """How far one sequence has been read: into its own index, and into its tenant's."""

    own: SuffixIndex = field(default_factory=SuffixIndex)
    num_read: int = 0  # into the tenant's
    num_indexed: int = 0  # into its own
    output: list[int] = field(default_factory=list)  # the end of the prompt, and what was generated


class SuffixProposer(Lookup):
    """Proposes as far as what followed before is likely to follow again; often nothing."""

    def __init__(self, rules: Rules | None = None, capacity: int = 2**17) -> None:
        self._rules, self._past = rules or Rules(), PastOutputs(capacity)
        self._readings: WeakKeyDictionary[Sequence, _IndexedText] = WeakKeyDictionary()

    def look_up(self, sequence: Sequence, k: int) -> Found:
        """In the sequence itself and in its tenant's past: the better one, the sequence's own where they are equal."""
        tokens, rules = sequence.tokens, self._rules
        reading = self._readings.setdefault(sequence, _IndexedText())
        self._read(sequence, reading)
        own = best_guess(tokens, reading.own.places(tokens, rules.most_places), k, rules)
        past = self._past.of(sequence.request.cache_salt).places(tokens, rules.most_places)
        # The sequence's own output is in the past too, where it would count twice.
        others = [place for place in past if place.text is not reading.output]
        best = max(own, best_guess(tokens, others, k, rules), key=lambda guess: guess.score)
        return Found(best.tokens, best.match)

    def _read(self, sequence: Sequence, reading: _IndexedText) -> None:
        """Index the new tokens of a sequence. Those of its last round are never indexed: no drafts follow it.

        Of a long prompt its own index takes a part at each guess, so that no step waits for all of it.
        """
        stop = min(len(sequence.tokens), reading.num_indexed + _MOST_READ)
        reading.own.grow(sequence.tokens, reading.num_indexed, stop)
        reading.num_indexed = stop
        # The end of the prompt goes along, so that an output can be found from its first token on.
        first = max(reading.num_read, sequence.prompt_len - self._rules.longest)
        known = len(reading.output)
        reading.output += sequence.tokens[first:]
        self._past.grow(sequence.request.cache_salt, reading.output, known)
        reading.num_read = len(sequence.tokens)
