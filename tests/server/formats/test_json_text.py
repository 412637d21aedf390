"""Laws of JSON that comes in pieces: what is JSON stays as it is, and what is written is JSON."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotfish.server.formats.json_text import JsonText, object_in
from tests.server.formats.walks import VALUES, cuts


def written(parts: list[str]) -> tuple[str, int | None]:
    """What is written of a text in parts, and where the value ends in it; None if it is broken or not complete."""
    value, found, text, at = JsonText(), list[str](), "", 0
    for i, part in enumerate(parts):
        text += part
        at = value.read(text, at, found, is_end=i == len(parts) - 1)
    return "".join(found), at if value.is_over else None


@settings(max_examples=30)
@given(VALUES, st.sampled_from([None, 2]), st.booleans(), st.sampled_from(["", ', "b": 1}', " ]", "\n<"]))
def test_json_is_written_as_it_is_up_to_its_end(value, indent, ascii_only, after):
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    for parts in [[text + after], *cuts(text + after, random.Random(0))]:
        assert written(parts) == (text, len(text))


@settings(max_examples=60)
@given(
    st.lists(
        st.sampled_from([*'{}[]",:\\\n\x01ux1-.e ', '"a"', "true", r"\ud83d", r"\ude00", "{", '{"a": ']), max_size=12
    )
)
def test_what_is_written_is_json(some):
    text = "".join(some)
    found, end = written([text])
    assert end is None or json.dumps(json.loads(found)).encode()
    for parts in cuts(text, random.Random(0)):
        assert written(parts) == (found, end)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('"a\nb\x1f"', r'"a\nb\u001f"'),
        (r'"C:\dir\new"', r'"C:\\dir\new"'),
        (r'"\u12"', r'"\\u12"'),
        ("[1e400, -1e999]", "[1.7976931348623157e+308, -1.7976931348623157e+308]"),
        (r'"\ud83d\ude00\ud83d\\\ude00"', r'"\ud83d\ude00\ufffd\\\ufffd"'),
    ],
)
def test_what_has_one_meaning_is_repaired(text, expected):
    assert written([*text]) == (expected, len(text))


@pytest.mark.parametrize(
    "text",
    ["NaN", "01", "+1", "1.", "tru", "{a: 1}", '{"a" 1}', '{"a": 1,}', "[1,]", "[1}", "1" * 1001, "[" * 257, "'a'"],
)
def test_all_else_is_broken(text):
    assert written([text])[1] is None
    assert object_in(f'{{"a": {text}}}') is None or text == "1" * 1001


def test_infinite_numbers_are_not_for_every_reader():
    assert object_in('{"a": 1e400}') is None
