"""Laws of the budget of reasoning: its end comes in time, and the state is a function of the tokens."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from pilotfish.engine.params import Guided, ThinkingBudget
from tests.engine.text.test_guided import CODEC, COMPILER, END, SECOND_END, VOCAB, fill

JSON = '{"type": "integer"}'


def compiled(most, begin=None, grammar=None):
    thinking = ThinkingBudget(max_tokens=most, end="</think>", begin=begin)
    return COMPILER.compile(Guided(grammar=grammar, thinking=thinking))


def walk(state, rng, most=60):
    """Random allowed tokens, none of them an end token; after each some are taken back and given again."""
    tokens = []
    for _ in range(most):
        allowed = [token for token in fill(state) if token not in (END, SECOND_END)]
        if not allowed:
            break
        token = rng.choice(allowed)
        assert state.advance([token]) == 1
        tokens.append(token)
        back = rng.randint(0, min(4, len(tokens)))
        state.rollback(back)
        assert state.advance(tokens[len(tokens) - back :]) == back
    return tokens


def state_after(grammar, tokens):
    state = grammar.start()
    assert state.advance(tokens) == len(tokens)
    return state


GRAMMARS = {
    "free": (None, None),
    "json": (None, 'start: inside %json {"type": "integer"}\ninside[suffix="</think>"]: /(?s:.*)/'),
    "opened": ("<think>", 'start: "<think>" inside "x"\ninside[suffix="</think>"]: /(?s:.*)/'),
}


@pytest.mark.parametrize("name", GRAMMARS)
@pytest.mark.parametrize("most", [0, 1, 7])
def test_reasoning_ends_with_the_budget(name, most):
    begin, lark = GRAMMARS[name]
    grammar = compiled(most, begin, lark)
    for seed in range(5):
        tokens = walk(grammar.start(), random.Random(seed))
        text = CODEC.decode(tokens)
        if begin is not None:
            assert text.startswith(begin)
        spent = CODEC.encode(text, bare=True)  # not the tokens, whose number is no matter of the text
        assert "</think>" in text or len(spent) <= most + 12
        inside = next(i for i in range(len(tokens) + 1) if "</think>" in CODEC.decode(tokens[:i]))
        begun = 0 if begin is None else next(i for i in range(len(tokens) + 1) if CODEC.decode(tokens[:i]) >= begin)
        assert inside <= begun + most + len(CODEC.encode("</think>", bare=True)) + 3  # bytes of a character


@pytest.mark.parametrize("name", GRAMMARS)
def test_masks_are_a_function_of_the_tokens(name):
    """However they came: one by one, all at once, or with others that were taken back."""
    begin, lark = GRAMMARS[name]
    grammar = compiled(5, begin, lark)
    for seed in range(8):
        tokens = walk(grammar.start(), random.Random(seed), most=25)
        for stop in range(0, len(tokens) + 1, 3):
            once = state_after(grammar, tokens[:stop])
            longer = state_after(grammar, tokens)
            longer.rollback(len(tokens) - stop)
            assert fill(once) == fill(longer)


def test_only_the_end_fits_after_the_budget():
    grammar = compiled(3)
    words, end = CODEC.encode("a b c", bare=True)[:3], list(CODEC.encode("</think>", bare=True))
    state = state_after(grammar, words)
    assert state.advance([words[0]]) == 0
    for token in end:
        assert fill(state) == [token]
        assert state.advance([token]) == 1
    mask = torch.zeros(VOCAB, dtype=torch.bool)
    state.fill(mask)
    assert mask.all()  # nothing is forbidden after the reasoning


def test_an_end_inside_of_one_token_counts():
    """Where reasoning ends early, with other text in the same token, nothing is required later."""
    grammar = compiled(10)
    early = [*CODEC.encode("a</think>", bare=True), *CODEC.encode("b c d e f g h", bare=True)]
    assert len(state_after(grammar, early)._tails) < len(early)


def test_an_output_that_does_not_reason_is_free_of_the_budget():
    grammar = compiled(2, "<think>")
    words = CODEC.encode("no thought at all", bare=True)
    assert state_after(grammar, words).advance(words) == len(words)


def test_white_space_before_the_reasoning_is_not_kept():
    """Else each token would take as long as all before it."""
    state = state_after(compiled(2, "<think>"), CODEC.encode(" ", bare=True) * 200)
    assert not any(state._tails)
    for token in CODEC.encode("<think>a b c", bare=True):
        if state.advance([token]) == 0:
            break
    assert fill(state) == [CODEC.encode("</think>", bare=True)[0]]


def test_begin_and_end_in_one_token():
    """A reasoning that has ended where it began requires no end."""
    grammar = compiled(0, "<think>")
    grammar.codec = SimpleNamespace(decode=lambda ids, **_: {1: "<thi", 2: "nk></think>", 3: "x"}[ids[0]])
    assert state_after(grammar, [1, 2]).advance([3, 3]) == 2


def test_tokens_without_text_hide_no_end():
    grammar = compiled(20)
    grammar.codec = SimpleNamespace(decode=lambda ids, **_: {1: "</thi", 2: "", 3: "nk>", 4: "x"}[ids[0]])
    assert state_after(grammar, [1, *[2] * 10, 3]).advance([4] * 30) == 30
