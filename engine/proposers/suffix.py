"""SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975): drafts the most frequent continuations of the longest matches.

Searches the request itself (prompt and output) and past outputs of the same tenant. Drafts never change an output, so
sharing past outputs would not reveal text; but accepted drafts make a step faster, and time can be measured. So tenants
(`Request.cache_salt`) do not share.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple
from weakref import WeakKeyDictionary

from pilotfish.engine.control.goodput import Found
from pilotfish.engine.proposers.base import Lookup
from pilotfish.engine.types import Sequence

Pair = tuple[int, int]

_MOST_READ = 256  # tokens of a sequence's own text indexed per step: one or two milliseconds
_MOST_TENANTS = 1024  # maximum number of tenants with past outputs


class Match(NamedTuple):
    """A match in a text, which ends just before `text[end]`."""

    text: list[int]
    end: int


@dataclass(frozen=True, slots=True)
class Guess:
    """Drafts, and the expected number of accepted ones (the paper's score, section 4.2)."""

    tokens: tuple[int, ...] = ()
    score: float = 0.0
    match: int = 0  # length of the match


@dataclass(frozen=True, slots=True)
class Rules:
    """Parameters of matching; the defaults were chosen on the embedded pair."""

    shortest: int = 2  # minimum length of a match; at least 2, because the index has pairs
    longest: int = 16  # longer matches count equally
    reach: float = 2.0  # drafts per token of match: the paper's alpha
    least: float = 0.5  # minimum estimated probability of acceptance
    most_places: int = 32  # maximum number of counted occurrences, newest first


class SuffixIndex:
    """The end positions of each pair of tokens, oldest first, over growing texts; longer matches extend to the left.

    Equivalent to a suffix tree for matches of two or more tokens, in linear memory, with constant work per added and
    per dropped token.
    """

    def __init__(self, capacity: int | None = None) -> None:
        self._places: dict[Pair, list[Match]] = {}
        self._order, self._capacity = deque[Pair](), capacity  # keys of `_places`, oldest first

    def __len__(self) -> int:
        """Number of places, one per token."""
        return len(self._order)

    def grow(self, text: list[int], start: int, stop: int | None = None) -> None:
        """Index `text[start:stop]`. The list is not copied: it may grow, but its tokens must not change."""
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
        """The newest places, at most `most`, of the last pair of `tokens`."""
        if len(tokens) < 2:
            return []
        found = self._places.get((tokens[-2], tokens[-1]), [])
        # The end of the text itself is not an earlier occurrence.
        elsewhere = (p for p in reversed(found) if p.end < len(p.text))
        return list(islice(elsewhere, most))


def match_length(tokens: list[int], place: Match, longest: int) -> int:
    """The number of tokens before `place` that match the end of `tokens`, up to `longest`."""
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
    """The most frequent next tokens, while the estimated probability that all so far are right is high enough.

    At its end the request's own text is continued by the drafts themselves: [.. a b a b] wraps around.
    """
    chance, made = 1.0, list[int]()
    while places:
        following = [(place, _next(place, len(made), tokens, made)) for place in places]
        counts = Counter(token for _, token in following if token is not None)
        if not counts:
            return
        # Ties: the newest place comes first, and a Counter keeps the order of insertion.
        token, count = counts.most_common(1)[0]
        chance *= count / counts.total()
        if chance < least:
            return
        made.append(token)
        yield token, chance
        places = [place for place, t in following if t == token]


def _next(place: Match, offset: int, tokens: list[int], made: list[int]) -> int | None:
    """The token at `offset`, or None beyond the end of the text."""
    at = place.end + offset
    if at < len(place.text):
        return place.text[at]
    return made[at - len(place.text)] if place.text is tokens else None


class PastOutputs:
    """One index per tenant: at most `capacity` tokens in total, a quarter of it per tenant.

    Evicts the oldest tokens of a tenant beyond its limit, and the least recently served tenant beyond the total.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity, self._num_held = capacity, 0
        self._tenants: OrderedDict[str | None, SuffixIndex] = OrderedDict()

    def __len__(self) -> int:
        """Number of tokens over all tenants."""
        return self._num_held

    def of(self, tenant: str | None) -> SuffixIndex:
        """The tenant's index, which becomes the most recently used."""
        index = self._tenants.setdefault(tenant, SuffixIndex(max(1, self._capacity // 4)))
        self._tenants.move_to_end(tenant)
        return index

    def grow(self, tenant: str | None, text: list[int], start: int) -> None:
        """Index `text` from `start`, and evict tokens beyond the limits."""
        index = self.of(tenant)
        before = len(index)
        index.grow(text, start)
        self._num_held += len(index) - before
        while self._num_held > self._capacity or len(self._tenants) > _MOST_TENANTS:
            _, gone = self._tenants.popitem(last=False)
            self._num_held -= len(gone)


@dataclass(slots=True)
class _IndexedText:
    """The indexed positions of one sequence, in its own index and in its tenant's."""

    own: SuffixIndex = field(default_factory=SuffixIndex)
    num_read: int = 0  # into the tenant's
    num_indexed: int = 0  # into its own
    output: list[int] = field(default_factory=list)  # the end of the prompt, and what was generated


class SuffixProposer(Lookup):
    """Drafts while earlier continuations are likely to recur; often nothing."""

    def __init__(self, rules: Rules | None = None, capacity: int = 2**17) -> None:
        self._rules, self._past = rules or Rules(), PastOutputs(capacity)
        self._readings: WeakKeyDictionary[Sequence, _IndexedText] = WeakKeyDictionary()

    def look_up(self, sequence: Sequence, k: int) -> Found:
        """Search the sequence itself and its tenant's past; the better one, ties: the sequence's own."""
        tokens, rules = sequence.tokens, self._rules
        reading = self._readings.setdefault(sequence, _IndexedText())
        self._read(sequence, reading)
        own = best_guess(tokens, reading.own.places(tokens, rules.most_places), k, rules)
        past = self._past.of(sequence.request.cache_salt).places(tokens, rules.most_places)
        # The sequence's own output is also in the past, where it would count twice.
        others = [place for place in past if place.text is not reading.output]
        best = max(own, best_guess(tokens, others, k, rules), key=lambda guess: guess.score)
        return Found(best.tokens, best.match)

    def _read(self, sequence: Sequence, reading: _IndexedText) -> None:
        """Index the new tokens of a sequence, except those of its last round, which has no drafts after it.

        A long prompt is indexed in parts, so that no step waits for all of it.
        """
        stop = min(len(sequence.tokens), reading.num_indexed + _MOST_READ)
        reading.own.grow(sequence.tokens, reading.num_indexed, stop)
        reading.num_indexed = stop
        # Includes the end of the prompt, so that an output can be found from its first token on.
        first = max(reading.num_read, sequence.prompt_len - self._rules.longest)
        known = len(reading.output)
        reading.output += sequence.tokens[first:]
        self._past.grow(sequence.request.cache_salt, reading.output, known)
        reading.num_read = len(sequence.tokens)
