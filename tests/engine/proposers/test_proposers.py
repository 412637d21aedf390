"""Prompt lookup finds what was there, and grows without rescanning."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.proposers import NGramProposer
from tests.fakes import sequence


def by_rescan(tokens: list[int], k: int, sizes: tuple[int, ...]) -> list[int]:
    """The longest suffix that occurred before, at its newest earlier place; what followed, going round at the end."""
    for size in sizes:
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[-size:]:
                return [(tokens + tokens[end:] * k)[end + i] for i in range(k)]
    return []


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 8), st.integers(1, 60))
def test_lookup_equals_a_rescan(tokens: list[int], k: int, first: int) -> None:
    """Asked at every length on the way, and at the end only: the same."""
    proposer, growing = NGramProposer(sizes=(3, 2)), sequence(tokens[:first])
    for token in [*tokens[first:], None]:
        [got] = proposer.propose([growing], [k]).tokens
        assert list(got) == by_rescan(growing.tokens, k, (3, 2))
        if token is not None:
            growing.tokens.append(token)
