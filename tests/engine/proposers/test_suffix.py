"""Lookups find what counting by hand finds; the suffix index forgets what it must, and keeps tenants apart."""

from __future__ import annotations

import weakref
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotfish.engine.proposers import NGramProposer, SuffixProposer
from pilotfish.engine.proposers.suffix import Guess, PastOutputs, Rules, SuffixIndex, best_guess
from pilotfish.engine.types import Sequence
from tests import fakes
from tests.scripted import drafts_from

RULES = Rules(shortest=2, longest=5, reach=1.5, least=0.4, most_places=1000)


def sequence(tokens: list[int], salt: str | None = None, prompt_len: int | None = None) -> Sequence:
    return fakes.sequence(tokens, prompt_len=prompt_len, cache_salt=salt)


def by_hand(tokens: list[int], texts: list[list[int]], k: int, rules: Rules) -> Guess:
    """For each length of match: every earlier occurrence, by rescanning all texts; texts count in order of age."""
    best = Guess()
    for length in range(rules.shortest, min(rules.longest, len(tokens)) + 1):
        places = [
            (text, end)
            for text in texts
            for end in range(length, len(text))
            if text[end - length : end] == tokens[len(tokens) - length :]
        ]
        made, chance, score = [], 1.0, 0.0
        while len(made) < min(k, int(rules.reach * length)):
            heard = [_after(text, end + len(made), tokens, made) for text, end in reversed(places)]
            counts = Counter(token for token in heard if token is not None)
            if not counts:
                break
            token, count = counts.most_common(1)[0]
            chance *= count / counts.total()
            if chance < rules.least:
                break
            places = [p for p, t in zip(places, reversed(heard), strict=True) if t == token]
            made.append(token)
            score += chance
        if made and score >= best.score:
            best = Guess(tuple(made), score, length)
    return best


def _after(text: list[int], at: int, tokens: list[int], made: list[int]) -> int | None:
    if at < len(text):
        return text[at]
    return made[at - len(text)] if text is tokens else None


@settings(deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=40), st.integers(1, 8), st.integers(1, 40))
def test_a_request_in_itself(tokens: list[int], k: int, first: int) -> None:
    """Grown token by token and looked up at every length: as counted by hand."""
    text, index = tokens[:first], SuffixIndex()
    index.grow(text, 0)
    for token in [*tokens[first:], None]:
        got = best_guess(text, index.places(text, 1000), k, RULES)
        want = by_hand(text, [text], k, RULES)
        assert (got.tokens, round(got.score, 9)) == (want.tokens, round(want.score, 9))
        if token is not None:
            text.append(token)
            index.grow(text, len(text) - 1)


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 2), max_size=12), max_size=5),
    st.lists(st.integers(0, 2), max_size=8),
    st.integers(1, 30),
)
def test_past_texts_within_bounds(texts: list[list[int]], tokens: list[int], capacity: int) -> None:
    """What is held is the newest `capacity` places, no more, and those are what counting by hand finds in them."""
    index = SuffixIndex(capacity)
    for text in texts:
        index.grow(text, 0)
    everything = [(text, end) for text in texts for end in range(2, len(text) + 1)]
    held = everything[-capacity:]
    assert len(index) == len(held)
    assert sum(map(len, index._places.values())) == len(held)
    assert len(index._order) <= 2 * capacity + 1
    found = index.places(tokens, 1000)
    want = [(t, e) for t, e in reversed(held) if len(tokens) > 1 and t[e - 2 : e] == tokens[-2:] and e < len(t)]
    assert [(id(p.text), p.end) for p in found] == [(id(t), e) for t, e in want]


def test_tenants_are_separate() -> None:
    """An output is found by the requests of its own tenant, and by no others."""
    proposer = SuffixProposer()
    first = sequence([50, 51, *range(20)], "red", prompt_len=2)
    drafts_from(proposer, [first], [4])
    del first
    later = [sequence([77, 3, 4], salt) for salt in ("red", "blue", None)]
    assert drafts_from(proposer, later, [3] * 3) == ((5, 6, 7), (), ())


def test_live_outputs_are_found_and_the_own_is_not_counted_twice() -> None:
    proposer = SuffixProposer()
    one, two = sequence([1, 2, 3, 4, 5, 6], prompt_len=1), sequence([9, 9, 1, 2])
    drafts_from(proposer, [one], [4])
    assert drafts_from(proposer, [two], [4]) == ((3, 4, 5, 6),)
    two.tokens += [3, 4]
    assert drafts_from(proposer, [two], [4]) == ((5, 6),)
    past = proposer._past.of(None)
    assert sum(p.text is proposer._readings[two].output for p in past._places[3, 4]) == 1


def test_a_tenant_is_bounded_and_the_idle_one_goes_first() -> None:
    past = PastOutputs(capacity=40)
    for tenant in ("a", "b", "c", "a", "d", "e"):
        past.grow(tenant, list(range(100)), 0)
        assert len(past.of(tenant)) == 10, "a quarter of it"
        assert len(past) == sum(map(len, past._tenants.values())) <= 40
    assert list(past._tenants) == ["c", "a", "d", "e"], "b was served least recently"


def test_tenants_are_few_though_each_has_little() -> None:
    past = PastOutputs(capacity=10**6)
    for tenant in range(3000):
        past.grow(str(tenant), [1, 2, 3], 0)
    assert len(past._tenants) == 1024
    assert len(past) == sum(map(len, past._tenants.values()))
    assert str(2999) in past._tenants


@pytest.mark.parametrize("proposer", [SuffixProposer(), NGramProposer()], ids=["suffix", "ngram"])
def test_a_long_prompt_is_indexed_in_parts(proposer: SuffixProposer | NGramProposer) -> None:
    """No step waits for all of it, and in the end drafts are those that a look-up in all of it gives."""
    prompt = [*range(100, 5000), 1, 2, 3, 4, 5, 6, 7, 8]
    mine, read = sequence([*prompt, 1, 2, 3], prompt_len=len(prompt)), 0
    for _ in range(30):
        drafts = drafts_from(proposer, [mine], [3])[0]
        mine.tokens += [1, 2, 3]
        before, read = read, _num_indexed(proposer, mine)
        assert read - before <= 1024
    assert read >= len(prompt)
    assert drafts == (1, 2, 3)


def _num_indexed(proposer: SuffixProposer | NGramProposer, mine: Sequence) -> int:
    if isinstance(proposer, SuffixProposer):
        return proposer._readings[mine].num_indexed
    return max(index._seen for index in proposer._indexes[mine])


@pytest.mark.parametrize("proposer", [SuffixProposer(), NGramProposer()], ids=["suffix", "ngram"])
def test_what_was_read_goes_with_its_sequence(proposer: SuffixProposer | NGramProposer) -> None:
    mine = sequence([1, 2, 3])
    drafts_from(proposer, [mine], [2])
    gone = weakref.ref(mine)
    del mine
    assert gone() is None


# --------------------------------------------------------------------------------------------------- prompt lookup


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
        [got] = drafts_from(proposer, [growing], [k])
        assert list(got) == by_rescan(growing.tokens, k, (3, 2))
        if token is not None:
            growing.tokens.append(token)
