"""Prompt lookup finds what was there, and grows without rescanning."""

from __future__ import annotations

import gc

from hypothesis import given
from hypothesis import strategies as st

from engine.params import SamplingParams, SpeculationMode, SpeculationSettings, Verification
from engine.proposers import NGramProposer
from engine.types import Request, Sequence

SPECULATION = SpeculationSettings(
    mode=SpeculationMode.AUTO, num_draft_tokens=4, proposer="ngram", verification=Verification.COUPLED
)


def sequence(tokens: list[int]) -> Sequence:
    request = Request(request_id="r", token_ids=tuple(tokens), sampling=SamplingParams())
    return Sequence(
        request=request, seed=0, speculation=SPECULATION, max_len=999, end_token_ids=frozenset(), tokens=list(tokens)
    )


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


def test_a_repetition_is_continued_round_and_round() -> None:
    [drafts] = NGramProposer().propose([sequence([9, 1, 2, 1, 2, 1, 2])], [5]).tokens
    assert list(drafts) == [1, 2, 1, 2, 1]


def test_an_index_goes_with_its_sequence() -> None:
    proposer, mine = NGramProposer(), sequence([1, 2, 3])
    proposer.propose([mine], [2])
    assert len(proposer._indexes) == 1
    del mine
    gc.collect()
    assert len(proposer._indexes) == 0
