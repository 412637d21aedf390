"""Questions about terminals of Lark, answered by the library on bytes. Knows no schema."""

from __future__ import annotations

from functools import cache

from llguidance import LLMatcher, LLTokenizer

from engine.text.matcher import first_line, parser_limits

_LIMITS = parser_limits(initial_lexer_fuel=300_000)  # some 20 ms: a schema may ask hundreds of questions
_NO_WAY_ON = "NoExtensionBias"  # the library's report where neither a byte nor the end is possible


@cache
def _bytes() -> LLTokenizer:
    return LLTokenizer("byte")


def _matcher(terminal: str) -> LLMatcher:
    source = LLMatcher.grammar_from_lark(f"start: T\nT: {terminal}\n")
    matcher = LLMatcher(_bytes(), source, log_level=0, limits=_LIMITS)
    _check(matcher)
    return matcher


def _check(matcher: LLMatcher) -> None:
    if matcher.is_error():
        raise ValueError(first_line(matcher.get_error()))


def is_empty(terminal: str) -> bool:
    """Whether a terminal matches nothing. ValueError: it is wrong, or too costly."""
    matcher = _matcher(terminal)
    matcher.compute_bitmask()
    if matcher.is_error() and matcher.get_error().startswith(_NO_WAY_ON):
        return True
    _check(matcher)
    return False


class Texts:
    """The texts that a terminal matches. ValueError: it is wrong, or too costly."""

    def __init__(self, terminal: str) -> None:
        self._matcher = _matcher(terminal)

    def __contains__(self, text: str) -> bool:
        matcher, tokens = self._matcher.deep_copy(), list(text.encode())
        found = matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
        _check(matcher)
        return found
