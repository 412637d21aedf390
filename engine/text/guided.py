"""Compiles the structure of a request to a grammar, within limits.

`engine/text/schemas/rules.py` defines the documents that a JSON Schema allows. Any tokenization of an allowed text is
allowed.
"""

from __future__ import annotations

import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
from llguidance import LLMatcher, regex_to_lark

from pilotfish.engine.config import Bounds
from pilotfish.engine.errors import GrammarFault, InvalidRequest, Violation, shown
from pilotfish.engine.params import Guided
from pilotfish.engine.request.validation import structure_field, structure_texts, structure_violations
from pilotfish.engine.text.codec import Codec
from pilotfish.engine.text.matcher import CompiledGrammar, GrammarVocabulary, Unrestricted, first_line
from pilotfish.engine.text.schemas.keywords import parsed, parsed_part
from pilotfish.engine.text.schemas.numbers import is_library_schema
from pilotfish.engine.text.schemas.patterns import escaped
from pilotfish.engine.text.schemas.rules import SchemaRules
from pilotfish.engine.text.thinking import Budgeted
from pilotfish.engine.types import Grammar

# Without this, the library would allow only the canonical tokenization if only one text can follow.
_NO_FORCING = '%llguidance {"no_forcing": true}'
_FIRST_STEPS = 4  # tokens tried after compiling; an object with too many optional properties fails at the second
_MULTIPLES = re.compile(r'"multipleOf": (\d{1,9})')
_MAX_MULTIPLES = 50_000  # of a structure: the library takes about 10 us and 1 kB per unit of a multiple
_SHOWN = 40  # characters of a source quoted in an error

COMPILE_SECONDS = 5.0
_BOUNDS = Bounds.model_validate({})  # the defaults

_Result = CompiledGrammar | Unrestricted | Violation


@dataclass(frozen=True, slots=True)
class _CachedStructure:
    """A structure in the cache, with the future of its result."""

    result: Future[_Result]
    started: float  # time of the first request, from which all callers' time limits count


class GrammarCompiler:
    """Compiles and caches structures for one tokenizer. Thread-safe; its methods block.

    Args:
        codec: the tokenizer; byte-level and byte-fallback ones are supported.
        vocab_size: the width of the logits, at least the tokenizer's.
        eos_token_ids: tokens that end an output; at least one, because otherwise no output could end.
        bounds: of a structure's size.
        compile_seconds: maximum wait for a structure, from the first request for it; callers may set another limit.
        compile_threads: maximum number of concurrent compilations.
        cache_entries: maximum number of cached structures, compiled or refused.
    """

    def __init__(
        self, codec: Codec, vocab_size: int, eos_token_ids: Iterable[int], bounds: Bounds = _BOUNDS, *,
        compile_seconds: float = COMPILE_SECONDS, compile_threads: int = 2, cache_entries: int = 64,
    ) -> None:  # fmt: skip
        self._bounds, self._seconds, self._most = bounds, compile_seconds, cache_entries
        self._codec, ends = codec, tuple(dict.fromkeys(eos_token_ids))
        self._vocabulary = GrammarVocabulary(codec, vocab_size, ends)
        # The library releases the GIL during compilation, so abandoned compilations do not slow down other threads.
        self._threads = ThreadPoolExecutor(compile_threads, thread_name_prefix="guided")
        self._lock = threading.Lock()
        self._entries: OrderedDict[Guided, _CachedStructure] = OrderedDict()

    def ready(self, guided: Guided) -> Grammar | None:
        """Return the cached grammar without waiting; None if it is not compiled, or invalid."""
        with self._lock:
            entry = self._entries.get(replace(guided, thinking=None))
        if entry is None or not entry.result.done() or _is_useless(entry.result):
            return None
        result = entry.result.result()
        return None if isinstance(result, Violation) else self._budgeted(result, guided)

    def compile(self, guided: Guided, seconds: float | None = None) -> Grammar:
        """Return the grammar, compiled or from the cache. `seconds`: default `compile_seconds`.

        The first call takes a second longer with a large tokenizer, which does not count as compilation time.

        Raises:
            InvalidRequest: compilation failed, or timed out.
            Unsupported: the library cannot use the tokenizer.
        """
        if wrong := list(structure_violations(guided, self._bounds.max_structure_bytes, self._bounds.max_choices)):
            raise InvalidRequest(wrong)
        limit = self._seconds if seconds is None else seconds
        if not guided.is_free:
            self._vocabulary.prepare()
        entry = self._entry(replace(guided, thinking=None))
        try:
            result = entry.result.result(max(0.0, entry.started + limit - time.monotonic()))
        except TimeoutError:
            self._abandon(replace(guided, thinking=None), entry)
            raise InvalidRequest([_violation(guided, f"compilation took more than {limit:g} s")]) from None
        if isinstance(result, Violation):
            raise InvalidRequest([result])
        return self._budgeted(result, guided)

    def _budgeted(self, grammar: Grammar, guided: Guided) -> Grammar:
        return grammar if guided.thinking is None else Budgeted(grammar, guided.thinking, self._codec)

    def _entry(self, guided: Guided) -> _CachedStructure:
        with self._lock:
            entry = self._entries.get(guided)
            if entry is None or _is_useless(entry.result):
                result = self._threads.submit(_compile, self._vocabulary, guided)
                entry = self._entries[guided] = _CachedStructure(result, time.monotonic())
            self._entries.move_to_end(guided)
            if len(self._entries) > self._most:
                self._entries.popitem(last=False)
            return entry

    def _abandon(self, guided: Guided, entry: _CachedStructure) -> None:
        """Cancel a compilation that has not started; a running one continues, and later requests can use its result."""
        with self._lock:
            if entry.result.cancel() and self._entries.get(guided) is entry:
                del self._entries[guided]


def _is_useless(result: Future[_Result]) -> bool:
    """Whether to compile again: it never ran, failed by an internal error, or the shared lexer reached a limit."""
    if not result.done():
        return False
    if result.cancelled() or result.exception():
        return True
    grammar = result.result()
    return isinstance(grammar, CompiledGrammar) and grammar.worn


def _violation(guided: Guided, problem: str) -> Violation:
    source = " | ".join(text for _, text in structure_texts(guided))
    return Violation(structure_field(guided), f"is {shown(source, _SHOWN)}: {problem}")


# Compilation, on a separate thread


def _compile(vocabulary: GrammarVocabulary, guided: Guided) -> _Result:
    if guided.is_free:
        return Unrestricted()
    try:
        grammar = CompiledGrammar(vocabulary, _source(guided))
        _take_first_steps(grammar)
    except (ValueError, RecursionError, GrammarFault) as error:
        reason = first_line(str(error))
        return _violation(guided, reason if len(reason) <= 200 else reason[:199] + "…")
    return grammar


def _take_first_steps(grammar: CompiledGrammar) -> None:
    """Try a few tokens: GrammarFault if nothing matches or a mask is too costly. This also warms the first masks."""
    state, end_tokens = grammar.start(), list(grammar.vocabulary.end_tokens)
    mask = np.empty(grammar.vocabulary.vocab_size, dtype=np.bool_)
    for _ in range(_FIRST_STEPS):
        state.mark(mask)
        mask[end_tokens] = False
        if not mask.any():
            return
        state.advance([int(mask.argmax())])


def _source(guided: Guided) -> str:
    """The structure in the library's notation. Raises ValueError if it is invalid."""
    own = guided.grammar
    source = f"start: {rule_of(guided)}" if own is None else _with_own_schemas(own)
    if sum(map(int, _MULTIPLES.findall(source))) > _MAX_MULTIPLES:
        raise ValueError(f"the sum of all large multipleOf exceeds the limit of {_MAX_MULTIPLES}")
    # Appended, so that errors have the caller's line numbers.
    return LLMatcher.grammar_from_lark(f"{source}\n{_NO_FORCING}\n")


def rule_of(guided: Guided) -> str:
    """The structure as the right-hand side of a Lark rule, for use in a larger structure.

    Raises:
        ValueError: the structure is invalid.
    """
    if guided.json_schema is not None:
        return json_rule(guided.json_schema)
    if guided.grammar is not None:
        return f"%lark {{\n{_with_own_schemas(guided.grammar)}\n}}"
    regex = "|".join(map(escaped, guided.choice)) if guided.choice is not None else guided.regex or ""
    return f"/{regex_to_lark(regex, use_ascii='')}/"


def json_rule(schema: str, *, is_object: bool = False, lenient: bool = False, quote: str = "") -> str:
    """A JSON Schema as the right-hand side of a Lark rule.

    Args:
        schema: the text of the schema.
        is_object: allow only objects.
        lenient: ignore unsupported keywords.
        quote: a token around strings; empty: the documents are JSON. See `SchemaRules`.

    Raises:
        ValueError: the schema is invalid, or cannot be enforced exactly.
    """
    root = parsed(schema)
    return SchemaRules(root, lenient=lenient, quote=quote).text(root, {"type": "object"} if is_object else True)


def _with_own_schemas(grammar: str) -> str:
    """A grammar with our rules instead of `%json {...}`; they are appended, so that errors have the caller's lines."""
    parts, rules, at = list[str](), list[str](), 0
    for found in re.finditer(r"%json\s*", grammar):
        if found.start() >= at:
            schema, size = parsed_part(grammar[found.end() :])
            end = found.end() + size
            name = grammar[found.start() : end]
            if not is_library_schema(schema):
                name = f"json-schema-{len(rules)}"
                rules.append(f"{name}: {SchemaRules(schema).text(schema)}")
            parts += [grammar[at : found.start()], name]
            at = end
    return "\n".join(["".join([*parts, grammar[at:]]), *rules])
