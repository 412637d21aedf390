"""The state of one output in a compiled structure, based on llguidance.

All copies of a matcher share one lexer, and when that lexer reaches a limit, every copy fails. But a fault must end
only one request. So a state whose lexer fails continues with its own new matcher, which is fed the tokens so far. Only
if this matcher also fails is the request itself at fault.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from pilotfish.engine.errors import GrammarFault, ModelError, Unsupported
from pilotfish.engine.machine.mapped import release_freed
from pilotfish.engine.text.codec import Codec, structure_problem
from pilotfish.engine.types import GRAMMAR_TOKENS

if TYPE_CHECKING:
    from torch import Tensor

# The cost limits of one mask, chosen by measurement (docs/adr/0007-structured-output-llguidance.md). A structure that
# needs more is refused when it is compiled, or ends its request later.
STEP_LEXER_FUEL = 100_000
STEP_MAX_ITEMS = 5_000
MAX_ITEMS_IN_ROW = 500
# The limits on compiling and keeping a structure.
INITIAL_LEXER_FUEL = 1_000_000
MAX_LEXER_STATES = 50_000
MAX_GRAMMAR_SIZE = 20_000

# The library recurses from rule to rule without a limit: about 3 kB of stack per rule of a chain, and a crash if the
# stack is full. Only used stack takes memory.
_STACK_BYTES = 256 * 2**20
_STACK_LOCK = threading.Lock()  # the size is a process-wide setting

RENEWAL_SECONDS = 0.1  # maximum seconds within a step to give one state its own matcher
_T = TypeVar("_T")
_NAME = b"\xff"  # prefix of the name of a token without text
_LEXER_FAILED = "lexer error"  # how the library's report begins; the stop reason is always `InternalError`


def parser_limits(initial_lexer_fuel: int = INITIAL_LEXER_FUEL) -> LLParserLimits:
    """The limits of every matcher."""
    return LLParserLimits(
        max_items_in_row=MAX_ITEMS_IN_ROW,
        initial_lexer_fuel=initial_lexer_fuel,
        step_lexer_fuel=STEP_LEXER_FUEL,
        step_max_items=STEP_MAX_ITEMS,
        max_lexer_states=MAX_LEXER_STATES,
        max_grammar_size=MAX_GRAMMAR_SIZE,
        verbose_errors=False,  # verbose messages would quote the structure
    )


class GrammarVocabulary:
    """The vocabulary in the library's form; logits ids beyond the tokenizer's are never allowed."""

    def __init__(self, codec: Codec, vocab_size: int, end_tokens: tuple[int, ...]) -> None:
        """Lazy: the library's form takes a second and much memory. Raises ModelError: see `structure_problem`."""
        if problem := structure_problem(codec, vocab_size, end_tokens):
            raise ModelError(f"guided decoding is not supported: {problem}")
        self.vocab_size, self.end_tokens = vocab_size, end_tokens
        self._codec, self._lock = codec, threading.Lock()
        self._made: LLTokenizer | str | None = None  # or the error

    def prepare(self) -> LLTokenizer:
        """The library's form, created at the first call. Raises Unsupported if that fails.

        The library holds the GIL meanwhile, up to a second with 262,144 tokens.
        """
        with self._lock:
            self._made = self._made or self._make()
        if isinstance(self._made, str):
            raise Unsupported(f"guided decoding does not support this tokenizer: {self._made}")
        return self._made

    def _make(self) -> LLTokenizer | str:
        tokens = _Tokens(self._codec, self.vocab_size, self.end_tokens[0])
        try:
            return LLTokenizer(TokenizerWrapper(tokens), eos_token=list(self.end_tokens))
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            return first_line(str(error))
        finally:
            tokens.tokens.clear()  # the library keeps the object, and copies these
            release_freed()

    def matcher(self, source: str) -> LLMatcher:
        """Make a matcher with its own lexer; its `get_error` reports errors of `source`."""
        tokenizer = self.prepare()
        with ThreadPoolExecutor(1, thread_name_prefix="matcher") as thread:
            with _STACK_LOCK:
                usual = threading.stack_size(_STACK_BYTES)
                try:
                    made = thread.submit(LLMatcher, tokenizer, source, log_level=0, limits=parser_limits())
                finally:
                    threading.stack_size(usual)
            return made.result()


class _Tokens:
    """The tokenizer interface of the library. Its own reader of tokenizer.json would store all merges again."""

    bos_token_id = None
    special_token_ids = ()

    def __init__(self, codec: Codec, vocab_size: int, end_token: int) -> None:
        """The bytes of tokens; special ones and similar ones have names that no text matches."""
        spell, names = codec.spelling.bytes_of, {i: t for t, i in codec.added_tokens.items() if i < vocab_size}
        named = {i for i, text in names.items() if i in codec.special_tokens or (text[:1], text[-1:]) == ("<", ">")}
        self.tokens = [spell(i) or b"" for i in range(vocab_size)]
        size = codec.tokenizer.get_vocab_size(with_added_tokens=True)
        for i in named | {i for i in range(size, vocab_size) if not self.tokens[i]}:
            self.tokens[i] = _NAME + names.get(i, f"<[{i}]>").encode()
        self.eos_token_id, self._encode = end_token, codec.encode

    def __call__(self, text: str) -> list[int]:
        return list(self._encode(text, bare=True))


class CompiledGrammar:
    """A compiled structure; `source` is in the library's own notation. See `engine.types.Grammar`.

    Raises ValueError with the library's message if the structure cannot be used.
    """

    def __init__(self, vocabulary: GrammarVocabulary, source: str) -> None:
        self.vocabulary = vocabulary
        started = time.perf_counter()
        self._source = source
        self._first = vocabulary.matcher(source)
        if self._first.is_error():
            raise ValueError(self._first.get_error())
        self.compile_seconds = time.perf_counter() - started
        self.worn = False  # its shared lexer reached a limit: a cache should compile the structure again

    def start(self) -> MatcherState:
        return MatcherState(self, self._first.deep_copy())

    def renew(self) -> LLMatcher | None:
        """Make an independent matcher; None if this would delay a step too long."""
        self.worn = True
        return self.vocabulary.matcher(self._source) if self.compile_seconds <= RENEWAL_SECONDS else None


class Unrestricted:
    """No structure: any text, which may end anywhere. See `engine.types.Grammar` and `GrammarState`."""

    def start(self) -> Unrestricted:
        """Return self, which is stateless."""
        return self

    def fill(self, mask: Tensor) -> None:
        mask.fill_(True)

    def advance(self, tokens: Seq[int]) -> int:
        return len(tokens)

    def rollback(self, num_tokens: int) -> None:
        """Do nothing."""


class MatcherState:
    """The state of one output in a structure. See `engine.types.GrammarState`.

    This class handles end tokens itself, because the library accepts none after a structure is complete. An end token
    is allowed where the structure may end. It is never text, even if its id has one.
    """

    def __init__(self, grammar: CompiledGrammar, matcher: LLMatcher) -> None:
        self._grammar = grammar
        self._vocabulary = grammar.vocabulary
        self._matcher = matcher
        self._shared = True  # whether the lexer is shared with other states of this grammar
        self._tokens: list[int] = []  # accepted tokens, without an end token
        self._ended = False
        self._bits = np.zeros(-(-self._vocabulary.vocab_size // 32), dtype=np.int32)

    def fill(self, mask: Tensor) -> None:
        """Write the allowed next tokens; after an end token the end tokens, so that the distribution is not zero."""
        self.mark(mask.numpy())

    def mark(self, allowed: NDArray[np.bool_]) -> None:
        """The same for an array, because structures are also compiled without tensors."""
        assert allowed.shape == (self._vocabulary.vocab_size,), f"a mask of shape {allowed.shape}"
        if self._ended:
            allowed[:] = False
        else:
            pointer, num_bytes = self._bits.ctypes.data, self._bits.nbytes
            self._tried(lambda matcher: matcher.unsafe_compute_mask_ptr(pointer, num_bytes))
            size = self._vocabulary.vocab_size
            allowed.view(np.uint8)[:] = np.unpackbits(self._bits.view(np.uint8), count=size, bitorder="little")
        allowed[list(self._vocabulary.end_tokens)] = self._ended or self._matcher.is_accepting()
        if not allowed.any():
            raise GrammarFault(f"after {len(self._tokens)} tokens no token is allowed")

    def advance(self, tokens: Seq[int]) -> int:
        """Accept the longest valid prefix of the tokens; return its length. Nothing is valid after an end token."""
        if self._ended:
            return 0
        ends = (i for i, token in enumerate(tokens) if token in self._vocabulary.end_tokens)
        num_text = next(ends, len(tokens))
        text = list(tokens[:num_text])
        taken = self._tried(lambda matcher: matcher.try_consume_tokens(text)) if text else 0
        self._tokens += text[:taken]
        self._ended = taken == num_text < len(tokens) and self._matcher.is_accepting()
        return taken + self._ended

    def rollback(self, num_tokens: int) -> None:
        """Roll back the last `num_tokens` accepted tokens, including an end token."""
        assert num_tokens <= len(self._tokens) + self._ended, f"taking back {num_tokens} of {len(self._tokens)} tokens"
        num_text = num_tokens - (self._ended and num_tokens > 0)
        self._ended = self._ended and num_tokens == 0
        if num_text:
            self._matcher.rollback(num_text)  # if it fails, the next fill fails too, and repairs or reports it
            del self._tokens[-num_text:]

    def _tried(self, ask: Callable[[LLMatcher], _T]) -> _T:
        """Try the matcher, and if it has failed a new one."""
        found = ask(self._matcher)
        if self._matcher.is_error():
            self._renew()
            found = ask(self._matcher)
            self._check()
        return found

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = first_line(self._matcher.get_error())
            raise GrammarFault(f"after {len(self._tokens)} tokens the grammar failed: {reason}")

    def _renew(self) -> None:
        """Continue with a separate lexer, because the shared one failed, perhaps on another request's tokens."""
        # Only the lexer is shared. If the parser reached a limit, a new one would reach it again at the same cost.
        if not self._shared or not self._matcher.get_error().startswith(_LEXER_FAILED):
            self._check()
        deadline = time.perf_counter() + RENEWAL_SECONDS
        matcher = self._grammar.renew()
        if matcher is None:
            self._check()
            return
        for start in range(0, len(self._tokens), GRAMMAR_TOKENS):
            matcher.consume_tokens(self._tokens[start : start + GRAMMAR_TOKENS])
            if time.perf_counter() > deadline:
                raise GrammarFault(f"after {len(self._tokens)} tokens the grammar failed: its limits were reached")
        self._matcher, self._shared = matcher, False
        self._check()


def first_line(error: str) -> str:
    """The useful line of the library's report: the last line that begins with `error:`, or else the first line."""
    lines = [line.strip() for line in error.replace("<non-verbose/>", "").splitlines() if line.strip()]
    named = [line.removeprefix("error:").strip() for line in lines if line.startswith("error:")]
    return (named or lines or ["it gave no reason"])[-1 if named else 0]
