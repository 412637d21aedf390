"""Patterns of ECMA-262: what they match, and that the others are refused by name."""

from __future__ import annotations

import json

import pytest

from tests.engine.text.schemas.accepting import Accepted


def said(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


@pytest.mark.parametrize(
    ("pattern", "matched", "others"),
    [
        ("[[:alpha:]]", ["a]", ":]", "x[]"], ["a", "b", "[:"]),
        ("^[a[bc]]$", ["a]", "[]", "c]"], ["a", "b"]),
        ("^[a-z&&[^b]]$", ["a]", "&]", "[]", "^]"], ["a", "b"]),
        ("^[^[]+$", ["a", "]", "a b"], ["[", "a[", ""]),
        (r"^\d$", ["7"], ["٣", "x"]),
        (r"^\w$", ["a", "_"], ["ä", "-"]),
        (r"^\s$", [" ", "\n", "\u00a0", "\ufeff", "\u2003"], ["x", "\u200b"]),
        (r"^\S\D\W$", ["aa-", "é!é"], ["a1-", "aaa", " a-"]),
        (r"^\cJ\cj\t$", ["\n\n\t"], ["cJ"]),
        (r"^\u0041\u{1F600}\x42$", ["A😀B"], ["A"]),
        (r"^\ud83d\ude00$", ["😀"], ["a"]),
        (r"^[\ud83d\ude00]$", ["😀"], ["a"]),
        ("^.$", ["a", "😀", '"', "\\"], ["\n", "\r", "\u2028", "ab", ""]),
        (r"^[\s\S]$", ["\n", "a", "\u2028"], [""]),
        ("^[^]$", ["\n", "a"], [""]),
        ("a]b}c{d", ["xa]b}c{dx"], ["ab"]),
        (r"^\-\_\/\.$", ["-_/."], ["a"]),
        (r"^[\w-x]$", ["-", "a", "x"], ["ä", "."]),
        (r"^[\b]$", ["\b"], ["b"]),
        ("^a|b$", ["a!", "!b", "ab"], ["!a!", "b!"]),
        ("(^|-)a($|-)", ["a", "-a-", "x-a", "a-x"], ["xa", "ax"]),
        ("^(?:a|b$)c?", ["a", "ac!", "b"], ["bc", "!a"]),
        ("(?<year>[0-9]{2,3}?)-(?:x+?|y*)", ["12-", "x123-yy"], ["1-", "12"]),
        ("b", ["b", "abc", "\nb\n"], ["a", ""]),
        ("", ["", "a"], []),
        ("^$", [""], ["a"]),
        (r"^\p{Lu}\p{L}*$", ["Ä", "Äb"], ["ä", "A1"]),
        (r"^\P{L}+$", ["1", '"', "\n"], ["a"]),
        (r"^[^\p{L}\d]+$", ['"', "\\", "-"], ["a", "1"]),
        (r"^\p{Script=Greek}+$", ["αβ"], ["ab", '"']),
        (r'^["\\/]+$', ['"', "\\/"], ["a"]),
        ("^a{0000000000002}$", ["aa"], ["a", "aaa"]),
        ("^ab*c d_{2}$", ["ac d__", "abbc d__"], ["abc dd_", "ab*c d__"]),
        (r"^(a|){2}$", ["", "a", "aa"], ["aaa"]),
    ],
)
def test_a_pattern_means_what_it_means_in_ecma(pattern: str, matched: list[str], others: list[str]) -> None:
    accepted = Accepted({"type": "string", "pattern": pattern})
    assert [text for text in matched if said(text) not in accepted] == []
    assert [text for text in others if said(text) in accepted] == []


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        ("a(?=b)", "has (?=, which is not supported"),
        ("a(?<!b)", "has (?<!"),
        (r"(a)\1", r"has \1"),
        (r"\ba", r"has \b"),
        (r"\Aa\Z", r"has \A"),
        ("(?i)a", "has (?i"),
        ("a{,5}", "has a {"),
        ("a**", "repeats a repetition"),
        ("a++", "repeats a repetition"),
        ("*a", "has a * that repeats nothing"),
        ("[b-a]", "out of order"),
        ("a{3,2}", "out of order"),
        ("a{1234567890}", "has more than 1000000 repetitions"),
        ("(a", "has a ( without its )"),
        ("a)", "has a ) without its ("),
        ("[a", "ends too early"),
        ("(^a)+", "has ^ or $ in what is repeated"),
        (r"\p{Unknown}", "has the property 'Unknown'"),
        ("a$b", "the schema is unsatisfiable"),
    ],
)
def test_other_patterns_are_refused_by_name(pattern: str, problem: str) -> None:
    with pytest.raises(ValueError, match=r"pattern|unsatisfiable") as info:
        Accepted({"type": "string", "pattern": pattern})
    assert problem in str(info.value)


def test_a_pattern_of_names_is_searched_as_well() -> None:
    schema = {
        "patternProperties": {"^[a[]x": {"type": "null"}, "x$": {"type": "integer"}},
        "additionalProperties": False,
    }
    accepted = Accepted(schema | {"type": "object", "properties": {"bx": {"minimum": 5}}})
    assert all(text in accepted for text in ('{"[xy":null}', '{"x":7}', '{"bx":6,"axe":null}', "{}"))
    assert all(text not in accepted for text in ('{"ax":null}', '{"ax":1}', '{"bx":4}', '{"b":1}', '{"[xy":7}'))
