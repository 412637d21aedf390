"""Where stop strings cut a text that comes in parts: anywhere in it, or in the answer only."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass


class StopStrings:
    """Finds strings in text that comes in parts, with one step per character, however many strings there are.

    Source: Aho and Corasick 1975, "Efficient string matching: an aid to bibliographic search".

    A state is a number, 0 at first. It is the longest beginning of a stop string that the text ends with. For
    the stop strings "abab" and "ba", and the text "xaba", this is "aba", and "ba" is complete. All outputs of a request
    share one object, because each keeps its own state.
    """

    def __init__(self, stops: Iterable[str] = ()) -> None:
        self._stops = tuple(stops)
        self._next: list[dict[str, int]] = [{}]  # of each state: the state after one more character of a stop string
        self._fallback = [0]  # of each state: the one of its longest proper suffix that begins a stop string, too
        self._length = [0]  # of each state, in characters
        # Of each state: the number of the first stop string that is its suffix; else how many there are.
        self._complete = [len(self._stops)]
        for number, stop in enumerate(self._stops):
            self._insert(stop, number)
        self._link()

    def __bool__(self) -> bool:
        return bool(self._stops)

    def _insert(self, stop: str, number: int) -> None:
        assert stop, "an empty stop string matches everywhere"
        state = 0
        for char in stop:
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self._fallback.append(0)
                self._length.append(self._length[state] + 1)
                self._complete.append(len(self._stops))
            state = self._next[state][char]
        self._complete[state] = min(self._complete[state], number)

    def _link(self) -> None:
        """Find the fallbacks, of shorter beginnings first."""
        states = deque(self._next[0].values())
        while states:
            state = states.popleft()
            for char, longer in self._next[state].items():
                fallback = self._fallback[longer] = self.step(self._fallback[state], char)
                self._complete[longer] = min(self._complete[longer], self._complete[fallback])
                states.append(longer)

    def step(self, state: int, char: str) -> int:
        """Return the state after `char`."""
        while state and char not in self._next[state]:
            state = self._fallback[state]
        return self._next[state].get(char, 0)

    def completed(self, state: int) -> str | None:
        """Return the stop string that the text ends with now, the first one listed if there are several."""
        number = self._complete[state]
        return self._stops[number] if number < len(self._stops) else None

    def num_held(self, state: int) -> int:
        """Return how many characters at the end of the text may begin a longer stop string.

        A whole stop string counts as ordinary text; its end may begin another one.
        """
        while state and not self._next[state]:
            state = self._fallback[state]
        return self._length[state]


NO_STOPS = StopStrings()


@dataclass(frozen=True, slots=True)
class Asides:
    """Parts of a text that are no answer: reasoning, and calls of functions. Stop strings are not looked for in them.

    Nor are they in white space that follows such a part, which no reader gets.

    Args:
        leading: marks of which one may begin the text, after white space.
        closes: marks of which each ends what a leading mark has begun; without any it lasts to the end.
        opens: marks of which each begins a part anywhere in the answer.
        resumes: marks of which each ends such a part; without any it lasts to the end.
        is_open: the text begins as if after a leading mark.
    """

    leading: tuple[str, ...] = ()
    closes: StopStrings = NO_STOPS
    opens: StopStrings = NO_STOPS
    resumes: StopStrings = NO_STOPS
    is_open: bool = False


NO_ASIDES = Asides()


@dataclass(frozen=True, slots=True)
class Stop:
    """A stop string that is complete, and how many characters before the end of what was read it begins."""

    text: str
    num_since: int


class StopSearch:
    """Looks for stop strings in one text, character by character.

    What may begin a mark can be part of a stop string, too. Then it is known only later which of the two it is, and the
    stop string is reported then.
    """

    def __init__(self, stops: StopStrings, asides: Asides = NO_ASIDES) -> None:
        self._stops, self._asides = stops, asides
        self._state = self._open = 0  # of the stop strings, and of the marks that begin a part
        self._lead: list[tuple[str, bool]] | None = [] if asides.leading else None  # what may be a leading mark
        self._closes: StopStrings | None = None  # of the part that the text is in
        self._close = 0
        self._is_gap = False  # after a part, nothing but white space has come
        self._found, self._age = "", 0  # a stop string, and how many characters came after it
        if asides.is_open:
            self._begin(asides.closes)

    @property
    def num_held(self) -> int:
        """How many characters at the end of the text may belong to a stop string."""
        if self._found:
            return len(self._found) + self._age
        return self._stops.num_held(self._state) if self._lead is None else len(self._lead)

    def read(self, char: str, *, counts: bool) -> Stop | None:
        """Read a character; return a stop string that is certain now. `counts`: one may end here."""
        if self._closes is not None:
            self._close = self._closes.step(self._close, char)
            if self._closes.completed(self._close) is not None:
                self._closes, self._is_gap = None, True
            return None
        if self._is_gap and char.isspace():
            return None
        self._is_gap = False
        return self._answer(char, counts=counts) if self._lead is None else self._leads(char, counts=counts)

    def end(self) -> Stop | None:
        """The text has ended: return a stop string that is certain now."""
        found = self._replay()
        return found or (Stop(self._found, self.num_held) if self._found else None)

    def _leads(self, char: str, *, counts: bool) -> Stop | None:
        assert self._lead is not None, "the beginning is over"
        self._lead.append((char, counts))
        text = "".join(char for char, _ in self._lead).lstrip()
        if text in self._asides.leading:
            self._lead = None
            self._begin(self._asides.closes)
            return None
        return None if any(mark.startswith(text) for mark in self._asides.leading) else self._replay()

    def _replay(self) -> Stop | None:
        """What has come is the beginning of the answer."""
        lead, self._lead = self._lead or [], None
        for i, (char, counts) in enumerate(lead, 1):
            found = self.read(char, counts=counts)
            if found is not None:
                return Stop(found.text, found.num_since + len(lead) - i)
        return None

    def _answer(self, char: str, *, counts: bool) -> Stop | None:
        self._state, self._open = self._stops.step(self._state, char), self._asides.opens.step(self._open, char)
        self._age += 1
        completed = self._stops.completed(self._state) if counts and not self._found else None
        if completed is not None:
            self._found, self._age = completed, 0
        if self._asides.opens.completed(self._open) is not None:
            self._begin(self._asides.resumes)
        elif self._found and self._asides.opens.num_held(self._open) <= self._age:
            return Stop(self._found, self.num_held)
        return None

    def _begin(self, closes: StopStrings) -> None:
        """A part begins that is no answer."""
        self._closes, self._close = closes, 0
        self._state = self._open = 0
        self._found = ""
