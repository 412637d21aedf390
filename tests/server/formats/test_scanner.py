"""Laws of what parsers are made of: cuts do not matter, nothing is lost, and little is held back."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from pilotfish.server.formats.base import Scanner, Trimmed
from tests.server.formats.walks import cuts

MARKERS = ("<a>", "<ab>", "<a>b", "x")


def split(parts: list[str]) -> list[tuple[str, str | None]]:
    """What `until` gives: the texts before the markers, joined, each with its marker."""
    scanner, found, text = Scanner(), [], ""
    for part in [*parts, None]:
        scanner.is_over = part is None
        scanner.push(part or "")
        while True:
            more, marker = scanner.until(*MARKERS)
            text += more
            if marker is None:
                break
            found.append((text, marker))
            text = ""
        assert len(scanner.held) < max(map(len, MARKERS))
    return [*found, (text, None)]


def plain_split(text: str) -> list[tuple[str, str | None]]:
    """The same by the definition: the first marker, the longest at its place."""
    for at in range(len(text)):
        if found := [marker for marker in MARKERS if text.startswith(marker, at)]:
            marker = max(found, key=len)
            return [(text[:at], marker), *plain_split(text[at + len(marker) :])]
    return [(text, None)]


@settings(max_examples=30)
@given(st.lists(st.sampled_from([*MARKERS, *"<ab>x "]), max_size=12).map("".join), st.integers(0, 9))
def test_text_is_split_at_markers_however_it_is_cut(text, seed):
    for parts in [[text], *cuts(text, random.Random(seed))]:
        assert split(parts) == plain_split(text)


def test_only_the_white_space_of_json_is_taken():
    scanner = Scanner()
    scanner.push(" \t\r\n\u00a0a")
    assert scanner.take_space() == " \t\r\n"
    assert scanner.take(5) == "\u00a0a"


@settings(max_examples=30)
@given(st.lists(st.text(" \na", max_size=4)), st.booleans())
def test_white_space_at_the_end_is_held_back(parts, leading):
    text, trimmed = "".join(parts), Trimmed(leading=leading)
    expected = text.lstrip() if leading else text
    passed = ""
    for i, part in enumerate(parts):
        passed += trimmed.add(part)
        so_far = "".join(parts[: i + 1])
        assert passed == (so_far.strip() if leading else so_far.rstrip())
    assert passed + trimmed.end(keep=True) == expected
    assert trimmed.add(" \n") + trimmed.add("b ") == "b"
    assert trimmed.end(keep=False) == ""


@settings(max_examples=30)
@given(st.text(" \na"), st.text(" \n"), st.text(" \na"))
def test_white_space_around_what_is_no_text_is_kept_between_texts(before, gap, after):
    trimmed = Trimmed(leading=False)
    passed = trimmed.add(before)
    trimmed.pause()
    passed += trimmed.add(gap)
    trimmed.pause()
    passed += trimmed.add(after) + trimmed.end(keep=True)
    first, last = before if before.strip() else "", after if after.strip() else ""
    assert passed == (first + gap + last if first and last else first.rstrip() + last.lstrip())
