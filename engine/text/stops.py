"""Finds stop strings in a text that arrives in parts: anywhere in it, or only in the answer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


class StopStrings:
    """Finds any of several strings in text that arrives in parts.

    The only state is the longest suffix of the text that is a prefix of a string; the caller stores it. For the stop
    strings "abab" and "ba", and the text "xaba", it is "aba"; "ba" was completed.
    """

    def __init__(self, stops: Iterable[str] = ()) -> None:
        self._stops = tuple(stops)
        assert all(self._stops), "an empty stop string matches everywhere"
        self._beginnings = {stop[:length] for stop in self._stops for length in range(1, len(stop))}
        self._firsts = frozenset(stop[0] for stop in self._stops)

    def __bool__(self) -> bool:
        return bool(self._stops)

    def ignores(self, end: str, text: str) -> bool:
        """Whether nothing in `text` belongs to a stop string: the new end is "", as that before."""
        return not end and self._firsts.isdisjoint(text)

    def step(self, end: str, char: str) -> tuple[str, str]:
        """Return the stop string that `char` completes, and the new suffix.

        "": it completes none. Of several the first listed one is returned. A complete stop string is ordinary text for
        the new suffix.
        """
        if not end and char not in self._firsts:
            return "", ""
        end += char
        completed = next(filter(end.endswith, self._stops)) if end.endswith(self._stops) else ""
        while end and end not in self._beginnings:
            end = end[1:]
        return completed, end


NO_STOPS = StopStrings()


@dataclass(frozen=True, slots=True)
class Asides:
    """The parts of a text outside of the answer: reasoning and calls. Stop strings are not searched in them.

    Nor in white space after such a part, which is not sent.

    Args:
        leading: markers, one of which may begin the text, after white space.
        closes: markers that end a part begun by a leading marker; without any it lasts to the end.
        opens: markers that begin a part anywhere in the answer.
        resumes: markers that end such a part; without any it lasts to the end.
        is_open: the text begins as if after a leading marker.
    """

    leading: tuple[str, ...] = ()
    closes: StopStrings = NO_STOPS
    opens: StopStrings = NO_STOPS
    resumes: StopStrings = NO_STOPS
    is_open: bool = False


NO_ASIDES = Asides()


class StopSearch:
    """Searches stop strings in one text, character by character.

    The beginning of a marker can also be part of a stop string, which is then reported later, when it is certain.
    `num_held`: number of characters at the end of the text that may belong to a stop string; a reported one begins that
    many characters before the end.
    """

    def __init__(self, stops: StopStrings, asides: Asides = NO_ASIDES) -> None:
        self._stops, self._asides = stops, asides
        # The suffixes of the text that may begin a stop string, the marker of a part, and the marker that ends the
        # part.
        self._stop = self._open = self._close = ""
        self._lead: list[tuple[str, bool]] | None = [] if asides.leading else None  # a possible leading marker
        self._closes: StopStrings | None = None  # of the current part
        self._is_gap = False  # only white space since the end of a part
        self._found, self._age = "", 0  # a stop string, and the number of characters after it
        if asides.is_open:
            self._begin(asides.closes)

    @property
    def num_held(self) -> int:
        if self._found:
            return len(self._found) + self._age
        return len(self._stop if self._lead is None else self._lead)

    def ignores(self, text: str) -> bool:
        """Whether no character of `text` matters, so that none has to be read."""
        if self._closes is not None:
            return self._closes.ignores(self._close, text)
        if self._is_gap or self._lead is not None or self._found:
            return False
        return self._stops.ignores(self._stop, text) and self._asides.opens.ignores(self._open, text)

    def read(self, char: str, *, counts: bool) -> str:
        """Read a character; return the stop string that is now certain, or "". `counts`: one may end here."""
        if self._closes is not None:
            ended, self._close = self._closes.step(self._close, char)
            if ended:
                self._closes, self._is_gap = None, True
            return ""
        if self._is_gap and char.isspace():
            return ""
        self._is_gap = False
        return self._answer(char, counts=counts) if self._lead is None else self._leads(char, counts=counts)

    def end(self) -> str:
        """End the text: return the stop string that is now certain, or ""."""
        return self._replay() or self._found

    def _leads(self, char: str, *, counts: bool) -> str:
        assert self._lead is not None, "not at the beginning"
        self._lead.append((char, counts))
        text = "".join(char for char, _ in self._lead).lstrip()
        if text in self._asides.leading:
            self._lead = None
            self._begin(self._asides.closes)
            return ""
        return "" if any(mark.startswith(text) for mark in self._asides.leading) else self._replay()

    def _replay(self) -> str:
        """Treat the text so far as the beginning of the answer."""
        lead, self._lead = self._lead or [], None
        for i, (char, counts) in enumerate(lead, 1):
            if found := self.read(char, counts=counts):
                self._age += len(lead) - i
                return found
        return ""

    def _answer(self, char: str, *, counts: bool) -> str:
        ended, self._stop = self._stops.step(self._stop, char)
        opened, self._open = self._asides.opens.step(self._open, char)
        self._age += 1
        if ended and counts and not self._found:
            self._found, self._age = ended, 0
        if opened:
            self._begin(self._asides.resumes)
        elif self._found and len(self._open) <= self._age:
            return self._found
        return ""

    def _begin(self, closes: StopStrings) -> None:
        """Begin a part outside of the answer."""
        self._closes = closes
        self._stop = self._open = self._close = self._found = ""
