"""Where one output stands in a compiled structure, over llguidance. Knows token ids; not what was asked, no cache.

A matcher's copies share one lexer, and once that lexer has met a limit every copy fails with it. A fault must end one
request alone, so a state whose lexer fails goes on with a matcher of its own, fed with the tokens so far; only if that
one fails as well is the fault its own.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from engine.errors import GrammarFault

if TYPE_CHECKING:
    from torch import Tensor

# What one mask may cost, chosen by measurement (docs/adr/0007-structured-output-llguidance.md): a structure that asks
# for more is refused when it is compiled, or ends its request later.
STEP_LEXER_FUEL = 100_000
STEP_MAX_ITEMS = 5_000
MAX_ITEMS_IN_ROW = 500
# What a structure may cost to compile and to keep.
INITIAL_LEXER_FUEL = 1_000_000
MAX_LEXER_STATES = 50_000
MAX_GRAMMAR_SIZE = 20_000

RENEWAL_SECONDS = 0.1  # most time inside a step to give one state a matcher of its own
_LEXER_FAILED = "lexer error"  # how the library's report begins; the stop reason is `InternalError` for everything
_REPLAY_TOKENS = 64  # between two looks at the clock while it is fed


def parser_limits() -> LLParserLimits:
    """The limits of every matcher."""
    return LLParserLimits(
        max_items_in_row=MAX_ITEMS_IN_ROW,
        initial_lexer_fuel=INITIAL_LEXER_FUEL,
        step_lexer_fuel=STEP_LEXER_FUEL,
        step_max_items=STEP_MAX_ITEMS,
        max_lexer_states=MAX_LEXER_STATES,
        max_grammar_size=MAX_GRAMMAR_SIZE,
        verbose_errors=False,  # verbose ones quote the structure
    )


@dataclass(frozen=True, slots=True)
class GrammarVocabulary:
    """The tokens as the library knows them; ids of the logits beyond the tokenizer's are never allowed."""

    tokenizer: LLTokenizer
    vocab_size: int
    end_tokens: tuple[int, ...]

    def matcher(self, source: str) -> LLMatcher:
        """A matcher with a lexer of its own; what is wrong with `source` is found in its `get_error`."""
        return LLMatcher(self.tokenizer, source, log_level=0, limits=parser_limits())


class CompiledGrammar:
    """A structure that compiled; `source` is in the library's own notation. See `engine.types.Grammar`."""

    def __init__(self, vocabulary: GrammarVocabulary, source: str) -> None:
        self.vocabulary = vocabulary
        started = time.perf_counter()
        self._source = source
        self._first = vocabulary.matcher(source)
        self.compile_seconds = time.perf_counter() - started
        self.worn = False  # its shared lexer has met a limit: whoever keeps it should compile anew

    @property
    def error(self) -> str:
        """Why it cannot be used, in the library's words; empty if it can."""
        return self._first.get_error()

    def start(self) -> MatcherState:
        """The state before the first generated token."""
        return MatcherState(self, self._first.deep_copy())

    def renew(self) -> LLMatcher | None:
        """A matcher that shares nothing with the others; None if that would hold up a step for too long."""
        self.worn = True
        return self.vocabulary.matcher(self._source) if self.compile_seconds <= RENEWAL_SECONDS else None


class MatcherState:
    """One output's way through a structure. See `engine.types.GrammarState`.

    End tokens are kept here, not in the library, which takes none once nothing else can follow. One of them ends the
    output where the structure may end and is never text, even if its id has some.
    """

    def __init__(self, grammar: CompiledGrammar, matcher: LLMatcher) -> None:
        self._grammar = grammar
        self._vocabulary = grammar.vocabulary
        self._matcher = matcher
        self._shared = True  # the lexer, with all states of this grammar that never failed
        self._tokens: list[int] = []  # taken, without an end token
        self._ended = False
        self._bits = np.zeros(-(-self._vocabulary.vocab_size // 32), dtype=np.int32)

    def fill(self, mask: Tensor) -> None:
        """Write which tokens may come next; after an end token the end tokens, so that a law is left."""
        self.mark(mask.numpy())

    def mark(self, allowed: NDArray[np.bool_]) -> None:
        """The same for an array: structures are compiled where there are no tensors, too."""
        assert allowed.shape == (self._vocabulary.vocab_size,), f"a mask of shape {allowed.shape}"
        if self._ended:
            allowed[:] = False
        else:
            self._compute_bits()
            size = self._vocabulary.vocab_size
            allowed.view(np.uint8)[:] = np.unpackbits(self._bits.view(np.uint8), count=size, bitorder="little")
        allowed[list(self._vocabulary.end_tokens)] = self._ended or self._matcher.is_accepting()
        if not allowed.any():
            raise GrammarFault(f"after {len(self._tokens)} tokens the structure has no way on")

    def advance(self, tokens: Seq[int]) -> int:
        """Take the longest leading part that fits; at most one end token, after which nothing fits."""
        if self._ended:
            return 0
        ends = (i for i, token in enumerate(tokens) if token in self._vocabulary.end_tokens)
        num_text = next(ends, len(tokens))
        taken = self._consume(list(tokens[:num_text]))
        self._ended = taken == num_text < len(tokens) and self._matcher.is_accepting()
        return taken + self._ended

    def rollback(self, num_tokens: int) -> None:
        """Take back the last `num_tokens` that were taken, an end token among them."""
        assert num_tokens <= len(self._tokens) + self._ended, f"taking back {num_tokens} of {len(self._tokens)} tokens"
        num_text = num_tokens - (self._ended and num_tokens > 0)
        self._ended = self._ended and num_tokens == 0
        if num_text:
            self._matcher.rollback(num_text)  # if it fails, so does the next fill, which mends or reports it
            del self._tokens[-num_text:]

    def _consume(self, tokens: list[int]) -> int:
        if not tokens:
            return 0
        taken = self._matcher.try_consume_tokens(tokens)
        if self._matcher.is_error():
            self._renew()
            taken = self._matcher.try_consume_tokens(tokens)
            self._check()
        self._tokens += tokens[:taken]
        return taken

    def _compute_bits(self) -> None:
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        if self._matcher.is_error():
            self._renew()
            self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
            self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = first_line(self._matcher.get_error())
            raise GrammarFault(f"after {len(self._tokens)} tokens the structure fails: {reason}")

    def _renew(self) -> None:
        """Go on with a lexer of its own: the shared one failed, perhaps on another request's tokens."""
        # Only the lexer is shared. A parser's limit would only be met again, at the same cost.
        if not self._shared or not self._matcher.get_error().startswith(_LEXER_FAILED):
            self._check()
        deadline = time.perf_counter() + RENEWAL_SECONDS
        matcher = self._grammar.renew()
        if matcher is None:
            self._check()
            return
        for start in range(0, len(self._tokens), _REPLAY_TOKENS):
            matcher.consume_tokens(self._tokens[start : start + _REPLAY_TOKENS])
            if time.perf_counter() > deadline:
                raise GrammarFault(f"after {len(self._tokens)} tokens the structure fails: its limits were met")
        self._matcher, self._shared = matcher, False
        self._check()


def first_line(error: str) -> str:
    """What a reader needs of the library's report: the last line that begins with `error:`, or the first line."""
    lines = [line.strip() for line in error.replace("<non-verbose/>", "").splitlines() if line.strip()]
    named = [line.removeprefix("error:").strip() for line in lines if line.startswith("error:")]
    return (named or lines or ["it gave no reason"])[-1 if named else 0]
