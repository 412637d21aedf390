"""A limit on the reasoning at the beginning of an output. Knows tokens and their text, and no request.

The end of the reasoning is found in the text, so it may come inside of an accepted run of drafts, in any tokenization
and together with other text in one token. Like every structure's, the state is a function of the output's tokens.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from engine.params import ThinkingBudget
from engine.text.codec import Codec
from engine.types import Grammar, GrammarState

if TYPE_CHECKING:
    from torch import Tensor


_HEAD = 64  # tokens among which reasoning has to begin


class Budgeted:
    """A structure whose outputs have at most so many tokens of reasoning. See `engine.types.Grammar`."""

    def __init__(self, inner: Grammar, budget: ThinkingBudget, codec: Codec) -> None:
        self.budget, self._inner, self._codec = budget, inner, codec
        self.end_ids = codec.encode(budget.end, bare=True)
        # An output that is to begin its reasoning itself has to have room for that.
        self.max_tokens = max(budget.max_tokens, len(codec.encode(budget.begin or "", bare=True)))

    def start(self) -> BudgetedState:
        """The state before the first generated token."""
        return BudgetedState(self, self._inner.start())

    def text_of(self, token: int) -> str:
        """Text of a token, special ones included; bytes that are no character by themselves become U+FFFD."""
        return self._codec.tokenizer.decode([token], skip_special_tokens=False)


class BudgetedState:
    """Where one output is: in its reasoning, in the end that follows the budget, or beyond.

    See `engine.types.GrammarState`. After the budget only the end of the reasoning may come, token by token.
    """

    def __init__(self, grammar: Budgeted, inner: GrammarState) -> None:
        self._grammar, self._inner = grammar, inner
        self._texts: list[str] = []  # of the tokens in the reasoning, with those of its end
        self._num_beyond = 0  # tokens after the reasoning
        self._is_reasoning = True

    def fill(self, mask: Tensor) -> None:
        """Write which tokens may come next."""
        required = self._required()
        if required is None:
            self._inner.fill(mask)
        else:
            mask.zero_()
            mask[required] = True

    def advance(self, tokens: Seq[int]) -> int:
        """Accept the longest leading part that fits; returns its length."""
        fitting = 0
        for token in tokens:
            if self._required() not in (None, token):
                break
            self._count(token)
            fitting += 1
        taken = self._inner.advance(tokens[:fitting])
        self._forget(fitting - taken)
        return taken

    def rollback(self, num_tokens: int) -> None:
        """Take back the last `num_tokens` accepted tokens."""
        self._inner.rollback(num_tokens)
        self._forget(num_tokens)

    def _required(self) -> int | None:
        """The only token that may come next; None where the budget requires none."""
        beyond = len(self._texts) - self._grammar.max_tokens
        has_to_end = self._is_reasoning and 0 <= beyond < len(self._grammar.end_ids)
        return self._grammar.end_ids[beyond] if has_to_end else None

    def _count(self, token: int) -> None:
        if self._is_reasoning:
            self._texts.append(self._grammar.text_of(token))
            self._is_reasoning = self._reasons()
        else:
            self._num_beyond += 1

    def _reasons(self) -> bool:
        """Whether the output reasons after its newest token, which alone can complete the end."""
        budget, head = self._grammar.budget, "".join(self._texts[:_HEAD]).lstrip()
        if budget.begin is not None and not (budget.begin.startswith(head) or head.startswith(budget.begin)):
            return False
        return budget.end not in "".join(self._texts[-len(budget.end) :])

    def _forget(self, num_tokens: int) -> None:
        inside = max(0, num_tokens - self._num_beyond)
        self._num_beyond -= num_tokens - inside
        if inside:
            del self._texts[-inside:]
            self._is_reasoning = True
