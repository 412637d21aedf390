"""A limit on the reasoning at the beginning of an output.

The end of the reasoning is found in the text, so it may occur within accepted drafts, in any tokenization and within a
token. Like every structure's, the state is a function of the output's tokens.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from pilotfish.engine.params import ThinkingBudget
from pilotfish.engine.text.codec import Codec
from pilotfish.engine.types import Grammar, GrammarState

if TYPE_CHECKING:
    from torch import Tensor


class Budgeted:
    """A structure with a maximum number of reasoning tokens. See `engine.types.Grammar`."""

    def __init__(self, inner: Grammar, budget: ThinkingBudget, codec: Codec) -> None:
        self.budget, self._inner, self.codec = budget, inner, codec
        self.end_ids = codec.encode(budget.end, bare=True)

    def start(self) -> BudgetedState:
        return BudgetedState(self, self._inner.start())


class BudgetedState:
    """The state of one output: in its reasoning, in the forced end, or after it.

    See `engine.types.GrammarState`. After the budget only the end of the reasoning is allowed, token by token; if a
    character is incomplete, and the structure requires it, it is completed first.
    """

    def __init__(self, grammar: Budgeted, inner: GrammarState) -> None:
        self._grammar, self._inner = grammar, inner
        # After each token of the reasoning and its end: the suffix of the text that may begin a marker.
        self._tails: list[str] = []
        self._num_beyond = 0  # tokens after the reasoning
        self._num_begin = 0 if grammar.budget.begin is None else None  # tokens of its beginning; None: it has not begun
        self._num_free: int | None = None  # number of tokens after which the end is forced; None: not yet
        self._is_reasoning = True
        self._begin_end()

    def fill(self, mask: Tensor) -> None:
        required = self._required
        if required is None:
            self._inner.fill(mask)
        else:
            mask.zero_()
            mask[required] = True

    def advance(self, tokens: Seq[int]) -> int:
        for i, token in enumerate(tokens):
            if not self._is_reasoning:
                taken = self._inner.advance(tokens[i:])
                self._num_beyond += taken
                return i + taken
            if self._required not in (None, token) or not self._inner.advance([token]):
                return i
            self._read(self._grammar.codec.decode([token], skip_special_tokens=False))
            self._begin_end()
        return len(tokens)

    def rollback(self, num_tokens: int) -> None:
        self._inner.rollback(num_tokens)
        inside = max(0, num_tokens - self._num_beyond)
        self._num_beyond -= num_tokens - inside
        if inside:
            del self._tails[-inside:]
            self._is_reasoning = True
            if self._grammar.budget.begin is not None and len(self._tails) < (self._num_begin or 0):
                self._num_begin = None
            if self._num_free is not None and len(self._tails) < self._num_free:
                self._num_free = None

    @property
    def _required(self) -> int | None:
        """The only allowed next token; None if the budget does not force one."""
        if self._num_free is None or not self._is_reasoning:
            return None
        return self._grammar.end_ids[len(self._tails) - self._num_free]

    def _begin_end(self) -> None:
        """Force the end from here, if the budget is used up and the structure allows the end."""
        if self._num_free is not None or self._num_begin is None or not self._is_reasoning:
            return
        first = self._grammar.end_ids[:1]
        if len(self._tails) >= self._num_begin + self._grammar.budget.max_tokens and self._inner.advance(first):
            self._inner.rollback(1)
            self._num_free = len(self._tails)

    def _read(self, text: str) -> None:
        """Process the text of a token: the reasoning begins, continues or ends, or there is none."""
        budget, seen = self._grammar.budget, (self._tails[-1] if self._tails else "") + text
        if budget.begin is not None and self._num_begin is None:
            seen = seen.lstrip()
            if seen.startswith(budget.begin):
                self._num_begin = len(self._tails) + 1
                seen = seen[len(budget.begin) :]
            else:
                self._is_reasoning = budget.begin.startswith(seen)
        if self._num_begin is not None:
            self._is_reasoning = budget.end not in seen
            seen = seen[-len(budget.end) :]
        self._tails.append(seen)
