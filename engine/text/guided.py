r"""Compiles the structure that a request asks for to a grammar. Knows source text and limits, and nothing of the step.

JSON Schema: keywords that the library does not implement are refused, never ignored. A mask forbids some valid
documents: those with white space around them, with more than `MAX_WHITESPACE` white-space characters in a row, with
properties in another order than the schema's, with control characters other than \b \f \n \r \t, and with escapes for
characters that need none (`\u0061`, `\/`); and dates of the year 0. Any tokenization of an allowed text is allowed.
"""

from __future__ import annotations

import json
import logging
import math
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer, regex_to_lark

from engine.config import Bounds
from engine.errors import GrammarFault, InvalidRequest, ModelError, Violation
from engine.params import Guided
from engine.request.validation import structure_field, structure_texts, structure_violations
from engine.text.codec import Codec
from engine.text.matcher import CompiledGrammar, GrammarVocabulary, Unrestricted, first_line
from engine.text.thinking import Budgeted
from engine.types import Grammar

MAX_WHITESPACE = 64  # so that a small model cannot write spaces for ever
# The library forbids `\u0061` for a declared property `a`, but accepts it as the name of another property. So a
# document could evade the property's schema. Without `\u` no character has two spellings.
_ESCAPES = 'bfnrt\\"'
_CONTROL = re.compile(r"(?<!\\)(?:\\\\)*(\\u00(?:[01].|7f))")
# Where only one text can follow, the library would allow only its usual tokens, and mask other tokens that it accepts.
_NO_FORCING = '%llguidance {"no_forcing": true}'
# `multipleOf: n` makes an automaton of n states, which no limit of the library covers: 999,983 took 14 s and 391 MB.
MAX_MULTIPLE = 20_000
_MAX_DECIMALS = 20
_FIRST_STEPS = 4  # tokens tried when compiling; an object with too many optional properties fails at its second token
_SHOWN = 40  # characters of a source in an error

# The library knows how long each month is, but gives every February 29 days. Years have four digits.
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATES = [
    {"pattern": f"^(?:[0-9]{{4}}-(?:0[13-9]|1[0-2])|[0-9]{{4}}-02-(?:[01]|2[0-8])|{_LEAP_YEAR}-02-29)"},
    {"pattern": "^0{0,3}[1-9]"},
]
_WITH_DATES = ("date", "date-time")
_DOCUMENTS = ("const", "default", "enum", "examples")  # keywords whose values are no schemas
_NAMED = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")  # the keys in their values

COMPILE_SECONDS = 5.0

_Result = CompiledGrammar | Unrestricted | Violation

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GuidedLimits:
    """Limits on the cost of a request's structure.

    Args:
        source_bytes: largest source in bytes of UTF-8; for a choice, all its texts together.
        choices: largest number of texts of one choice.
        compile_seconds: the longest wait for a structure, counted from the first request for it.
        compile_threads: how many structures compile at the same time.
        cache_entries: how many structures, compiled or refused, are kept.
        cache_bytes: how many bytes the sources of all kept structures may have together.
    """

    source_bytes: int = 64 * 1024
    choices: int = 4096
    compile_seconds: float = COMPILE_SECONDS
    compile_threads: int = 2
    cache_entries: int = 64
    cache_bytes: int = 2 * 1024 * 1024

    @classmethod
    def of(cls, bounds: Bounds, compile_seconds: float = COMPILE_SECONDS) -> GuidedLimits:
        """Take the sizes from `bounds`, and the defaults for all other limits."""
        sizes = {"source_bytes": bounds.max_structure_bytes, "choices": bounds.max_choices}
        return cls(**sizes, compile_seconds=compile_seconds)


@dataclass(frozen=True, slots=True)
class _CachedStructure:
    """A structure in the cache, with its present or future result."""

    result: Future[_Result]
    deadline: float  # for all callers that wait; a caller after the deadline does not wait at all
    num_bytes: int


class GrammarCompiler:
    """Compiles structures for one tokenizer, and keeps them. Its methods may be called from any thread; they block.

    Args:
        codec: the tokenizer; byte-level and byte-fallback ones are supported.
        vocab_size: the width of the logits, at least the tokenizer's.
        eos_token_ids: tokens that end an output; at least one, because otherwise no output could end.
        limits: limits on the cost of a request's structure.
    """

    def __init__(
        self, codec: Codec, vocab_size: int, eos_token_ids: Iterable[int], limits: GuidedLimits | None = None
    ) -> None:
        self._limits = limits or GuidedLimits()
        self._codec, self._vocabulary = codec, _vocabulary(codec, vocab_size, tuple(dict.fromkeys(eos_token_ids)))
        # The library releases the GIL while it compiles, so a thread after its deadline does not slow other threads.
        self._threads = ThreadPoolExecutor(self._limits.compile_threads, thread_name_prefix="guided")
        self._lock = threading.Lock()
        self._entries: OrderedDict[Guided, _CachedStructure] = OrderedDict()

    @classmethod
    def of(
        cls, codec: Codec | None, vocab_size: int, eos_token_ids: Iterable[int], bounds: Bounds,
        compile_seconds: float = COMPILE_SECONDS,
    ) -> GrammarCompiler | None:  # fmt: skip
        """Make a compiler for this checkpoint; None, with a line in the log, if it does not allow structured output."""
        ends = tuple(eos_token_ids)
        if codec is None or not ends:
            log.info("no structured output: the checkpoint has no %s", "end token" if codec else "tokenizer")
            return None
        try:
            return cls(codec, vocab_size, ends, GuidedLimits.of(bounds, compile_seconds))
        except ModelError as error:
            log.warning("%s", error)
            return None

    def compile(self, guided: Guided) -> Grammar:
        """Return the grammar, compiled or from the cache; InvalidRequest if it does not compile, or not in time."""
        num_bytes = check(guided, self._limits)
        entry = self._entry(replace(guided, thinking=None), num_bytes)
        try:
            result = entry.result.result(max(0.0, entry.deadline - time.monotonic()))
        except TimeoutError:
            self._abandon(replace(guided, thinking=None), entry)
            problem = f"is {_shown(guided)}: it did not compile within {self._limits.compile_seconds:g} s"
            raise InvalidRequest.of(structure_field(guided), problem) from None
        if isinstance(result, Violation):
            raise InvalidRequest([result])
        return result if guided.thinking is None else Budgeted(result, guided.thinking, self._codec)

    def _entry(self, guided: Guided, num_bytes: int) -> _CachedStructure:
        with self._lock:
            entry = self._entries.get(guided)
            if entry is None or _is_useless(entry.result):
                deadline = time.monotonic() + self._limits.compile_seconds
                entry = _CachedStructure(self._threads.submit(_compile, self._vocabulary, guided), deadline, num_bytes)
                self._entries[guided] = entry
            self._entries.move_to_end(guided)
            self._shrink()
            return entry

    def _abandon(self, guided: Guided, entry: _CachedStructure) -> None:
        """Cancel a compilation that has not begun; a running one goes on, and later requests can use its result."""
        with self._lock:
            if entry.result.cancel() and self._entries.get(guided) is entry:
                del self._entries[guided]

    def _shrink(self) -> None:
        total = sum(entry.num_bytes for entry in self._entries.values())
        while len(self._entries) > 1 and (
            len(self._entries) > self._limits.cache_entries or total > self._limits.cache_bytes
        ):
            total -= self._entries.popitem(last=False)[1].num_bytes


def _is_useless(result: Future[_Result]) -> bool:
    """Whether to compile again: it never ran, our code failed, or the grammar's shared lexer has met a limit."""
    if not result.done():
        return False
    if result.cancelled() or result.exception():
        return True
    grammar = result.result()
    return isinstance(grammar, CompiledGrammar) and grammar.worn


def _vocabulary(codec: Codec, vocab_size: int, end_tokens: tuple[int, ...]) -> GrammarVocabulary:
    size = codec.tokenizer.get_vocab_size(with_added_tokens=True)
    if size > vocab_size:
        raise ModelError(f"structured output: the tokenizer has {size} tokens, the model's logits only {vocab_size}")
    outside = [token for token in end_tokens if not 0 <= token < vocab_size]
    if outside or not end_tokens:
        wrong = f"has {outside[0]}; expected 0 to {vocab_size - 1}" if outside else "is empty: no output could end"
        raise ModelError(f"structured output: eos_token_ids {wrong}")
    try:
        tokenizer = LLTokenizer(codec.tokenizer.to_str(), n_vocab=vocab_size, eos_token=list(end_tokens))
    except (ValueError, RuntimeError) as error:
        raise ModelError(f"structured output cannot use this tokenizer: {first_line(str(error))}") from error
    return GrammarVocabulary(tokenizer, vocab_size, end_tokens)


# Checks before the structure is parsed


def check(guided: Guided, limits: GuidedLimits) -> int:
    """Return the bytes of the source; InvalidRequest unless there is exactly one and it is small enough.

    The time is at most proportional to the length of the source.
    """
    found = list(structure_violations(guided, limits.source_bytes, limits.choices))
    if found:
        raise InvalidRequest(found)
    return sum(len(text.encode()) for _, text in structure_texts(guided))


def _shown(guided: Guided) -> str:
    texts = [text for _, text in structure_texts(guided)]
    text = " | ".join(texts[:_SHOWN])
    return repr(text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…")


# Compilation, on a separate thread


def _compile(vocabulary: GrammarVocabulary, guided: Guided) -> _Result:
    if guided.is_free:
        return Unrestricted(vocabulary)
    try:
        grammar = CompiledGrammar(vocabulary, _source(guided))
        if grammar.error:
            return Violation(structure_field(guided), f"is {_shown(guided)}: {_reason(grammar.error)}")
        _take_first_steps(grammar)
    except (ValueError, RecursionError, GrammarFault) as error:
        return Violation(structure_field(guided), f"is {_shown(guided)}: {_reason(str(error))}")
    return grammar


def _take_first_steps(grammar: CompiledGrammar) -> None:
    """Try a few tokens: GrammarFault if nothing matches or a mask costs too much. This also warms the first masks."""
    state, end_tokens = grammar.start(), list(grammar.vocabulary.end_tokens)
    mask = np.empty(grammar.vocabulary.vocab_size, dtype=np.bool_)
    for _ in range(_FIRST_STEPS):
        state.mark(mask)
        mask[end_tokens] = False
        if not mask.any():
            return
        state.advance([int(mask.argmax())])


def _source(guided: Guided) -> str:
    """The structure in the library's own notation; a ValueError explains what is wrong with it."""
    if guided.grammar is not None:
        _check_multiples(guided.grammar[found.end() :] for found in re.finditer(r"%json\s*", guided.grammar))
        source = guided.grammar
    else:
        source = f"start: {rule_of(guided)}"
    # At the end, so that errors have the caller's line numbers.
    return LLMatcher.grammar_from_lark(f"{source}\n{_NO_FORCING}\n")


def rule_of(guided: Guided) -> str:
    """The structure as the right-hand side of a Lark rule, as a part of a larger structure.

    Raises:
        ValueError: the structure is wrong.
    """
    if guided.json_schema is not None:
        return json_rule(guided.json_schema)
    if guided.grammar is not None:
        return f"%lark {{\n{guided.grammar}\n}}"
    regex = "|".join(map(_literal, guided.choice)) if guided.choice is not None else guided.regex or ""
    return f"/{regex_to_lark(regex, use_ascii='')}/"


def json_rule(schema: str) -> str:
    """A JSON Schema as the right-hand side of a Lark rule: documents as the head of this module says.

    Raises:
        ValueError: the schema is wrong.
    """
    return f"%json {_schema(schema)}"


def _schema(text: str) -> str:
    """The schema with our options, quoted as in the library's grammars."""
    _check_multiples([text])
    spaces = rf"[\x20\x0A\x0D\x09]{{1,{MAX_WHITESPACE}}}"
    options: Any = {"whitespace_pattern": spaces, "json_allowed_escapes": _ESCAPES}
    schema = "{}" if text.strip() == "true" else text  # options need an object
    grammar = json.loads(LLMatcher.grammar_from_json_schema(schema, overrides=options))
    quoted = json.dumps(_with_real_dates(grammar["grammars"][0]["json_schema"]))
    if found := _CONTROL.search(quoted):
        raise ValueError(f"a string has the control character {found[1]}, which no output can hold")
    return quoted


def _with_real_dates(schema: Any, *, is_named: bool = False) -> Any:
    """The schema, with the dates of its `format` limited to those in the calendar; `is_named`: its keys are names."""
    if isinstance(schema, list):
        return [_with_real_dates(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    parts = {
        key: part
        if key in _DOCUMENTS and not is_named
        else _with_real_dates(part, is_named=key in _NAMED and not is_named)
        for key, part in schema.items()
    }
    if not is_named and schema.get("format") in _WITH_DATES and isinstance(parts.get("allOf", []), list):
        parts["allOf"] = [*parts.get("allOf", ()), *_DATES]
    return parts


def _literal(text: str) -> str:
    r"""A regex that matches exactly this text: "a.b" -> "a\x{2e}b"."""
    return "".join(char if char.isalnum() or not char.isascii() else f"\\x{{{ord(char):x}}}" for char in text)


def _check_multiples(texts: Iterable[str]) -> None:
    """Check every `multipleOf` in the JSON documents at the start of these texts, as if all applied to one number."""
    found: list[Decimal] = []

    def collect(pairs: list[tuple[str, Any]]) -> None:  # receives duplicate keys too
        found.extend(v for k, v in pairs if k == "multipleOf" and isinstance(v, Decimal) and v.is_finite())

    decoder = json.JSONDecoder(object_pairs_hook=collect, parse_float=Decimal, parse_int=Decimal)
    for text in texts:
        decoder.raw_decode(text.lstrip())
    if found and _common_multiple(found) > MAX_MULTIPLE:
        raise ValueError(f"the least common multiple of all multipleOf, without decimals, is above {MAX_MULTIPLE}")


def _common_multiple(numbers: list[Decimal]) -> int:
    """The least common multiple without decimals: 0.25 and 2 -> 25 and 200 hundredths -> 200."""
    if any(number.copy_abs() > MAX_MULTIPLE for number in numbers):
        return MAX_MULTIPLE + 1  # avoids integers with an unlimited number of digits
    decimals = max(0, *(-int(number.normalize().as_tuple().exponent) for number in numbers))
    if decimals > _MAX_DECIMALS:
        return MAX_MULTIPLE + 1
    scale = 10**decimals
    return math.lcm(*(int(abs(number) * scale) for number in numbers if number))


def _reason(error: str) -> str:
    reason = first_line(error).removeprefix("at 1(8): failed to compile JSON schema: ")  # a place in our text
    return reason if len(reason) <= 200 else reason[:199] + "…"
