"""Readings of a text in all cuts, walks under the masks of a grammar, and values of all kinds."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer

from pilotfish.server.formats.base import CallArguments, CallStart, ChatFormat, Content, Piece, Reasoning, Tool

TOKENIZER = Path(__file__).resolve().parents[3] / "models" / "target" / "tokenizer.json"
END = 0

_MARKERS = {  # of calls, by format
    "hermes": ("<tool_call>", "</tool_call>"),
    "qwen_coder": ("<tool_call>", "</tool_call>"),
    "glm": ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "llama": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    "gemma": (
        "<start_function_call>", "<end_function_call>", "<escape>", "<|tool_call>", "<tool_call|>", '<|"|>',
    ),
    "deepseek": tuple(
        f"<\uff5c{name}\uff5c>"
        for name in ("tool▁calls▁begin", "tool▁call▁begin", "tool▁sep", "tool▁call▁end", "tool▁calls▁end")
    ),
    "harmony": (
        "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|return|>", "<|call|>",
    ),
}  # fmt: skip


def markers_of(chat_format: ChatFormat | type[ChatFormat]) -> tuple[str, ...]:
    """The markers of calls that a format reads."""
    return _MARKERS.get(chat_format.name, ())


class Call(NamedTuple):
    """A call as the pieces give it: its arguments are JSON text."""

    name: str
    arguments: str


class Reading(NamedTuple):
    """The joined pieces of one output."""

    reasoning: str
    content: str
    calls: list[Call]


def tool(name: str, **properties: Any) -> Tool:
    """A tool with these properties, all of them required."""
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return Tool(name, parameters=json.dumps(schema))


# ---------------------------------------------------------------------------------------------------------- readings


def joined(pieces: Sequence[Piece]) -> Reading:
    """Join pieces; calls have to be numbered from 0, and to begin before their arguments."""
    names: list[str] = []
    arguments: list[str] = []
    texts = {Reasoning: "", Content: ""}
    for piece in pieces:
        if isinstance(piece, CallStart):
            assert piece.index == len(names)
            names.append(piece.name)
            arguments.append("")
        elif isinstance(piece, CallArguments):
            assert piece.index == len(names) - 1, "arguments of another call than the newest"
            arguments[-1] += piece.text
        else:
            assert piece.text, "an empty piece"
            texts[type(piece)] += piece.text
    return Reading(texts[Reasoning], texts[Content], [*map(Call, names, arguments)])


def pieces_of(
    chat_format: ChatFormat, tools: Sequence[Tool], parts: Sequence[str], *, is_cut: bool = False, **how: Any
) -> list[Piece]:
    """The pieces of a text that comes in these parts, and that `max_tokens` has ended with `is_cut`."""
    parser = chat_format.parser(tools, **how)
    pieces = [piece for part in parts for piece in parser.push(part)]
    return [*pieces, *parser.finish(is_cut=is_cut)]


def read(chat_format: ChatFormat, tools: Sequence[Tool], text: str, *, seed: int = 0, **how: Any) -> Reading:
    """Read a text at once, by characters, in two parts cut everywhere, and in random parts; all have to be the same."""
    first = joined(pieces_of(chat_format, tools, [text], **how))
    for parts in cuts(text, random.Random(seed)):
        assert joined(pieces_of(chat_format, tools, parts, **how)) == first, parts
    return first


def cuts(text: str, rng: random.Random) -> Iterator[list[str]]:
    """Ways to cut a text."""
    yield [*text]
    places = range(len(text)) if len(text) <= 50 else rng.sample(range(len(text)), 10)
    yield from ([text[:at], text[at:]] for at in places)
    for _ in range(3):
        places = sorted(rng.sample(range(len(text) + 1), min(rng.randint(1, 10), len(text) + 1)))
        yield [text[i:j] for i, j in zip([0, *places], [*places, len(text)], strict=True)]


# ------------------------------------------------------------------------------------------------------------- masks


class Masks:
    """Matchers for the tokenizer of the embedded pair, to which tokens may be added: text -> whether it is special."""

    def __init__(self, added: Mapping[str, bool] | None = None) -> None:
        tokenizer = Tokenizer.from_file(str(TOKENIZER))
        for text, is_special in (added or {}).items():
            tokenizer.add_tokens([AddedToken(text, special=is_special, normalized=False)])
        self.ids = {text: tokenizer.encode(text, add_special_tokens=False).ids[0] for text in added or ()}
        self.size = tokenizer.get_vocab_size(with_added_tokens=True)
        self.tokenizer = tokenizer
        self._matchers: dict[str, LLMatcher] = {}
        self._library = LLTokenizer(tokenizer.to_str(), n_vocab=self.size, eos_token=[END])

    def matcher(self, lark: str) -> LLMatcher:
        """A matcher of a grammar whose rule `start` is given; what is wrong with the grammar is an AssertionError."""
        source = f'{lark}\n%llguidance {{"no_forcing": true}}\n'
        matcher = LLMatcher(self._library, LLMatcher.grammar_from_lark(source), log_level=0)
        assert not matcher.is_error(), f"{matcher.get_error()}\n{source}"
        return matcher

    def accepts(self, lark: str, text: str) -> bool:
        """Whether the grammar matches the whole text, in the tokens that the tokenizer makes of it."""
        if lark not in self._matchers:
            self._matchers[lark] = self.matcher(lark)
        matcher, tokens = self._matchers[lark].deep_copy(), self.tokenizer.encode(text, add_special_tokens=False).ids
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    def walk(self, lark: str, rng: random.Random, *ends: str, most: int = 1500) -> str:
        """A text of random allowed tokens. After a while tokens that close something, and `ends`, are preferred."""
        matcher = self.matcher(lark)
        tokens: list[int] = []
        closers = [self.tokenizer.encode(text, add_special_tokens=False).ids for text in ends]
        while not (matcher.is_accepting() and (len(tokens) > 100 or rng.random() < 0.3)):
            for closer in closers if rng.random() < len(tokens) / 100 else ():
                taken = matcher.try_consume_tokens(closer)
                tokens += closer if taken == len(closer) else []
                assert taken == len(closer) or matcher.rollback(taken)
            allowed = self._allowed(matcher)
            if not allowed:
                break
            closing = [token for token in allowed if token in self._closing] if len(tokens) > 30 else []
            tokens.append(rng.choice(closing if closing and rng.random() < 0.7 else allowed))
            assert matcher.try_consume_tokens(tokens[-1:]) == 1, f"{self._text(tokens)!r}: {matcher.get_error()}"
            assert len(tokens) < most, f"no end: {self._text(tokens)!r}"
        assert matcher.is_accepting(), f"no way on: {self._text(tokens)!r}: {matcher.get_error()}"
        return self._text(tokens)

    def _allowed(self, matcher: LLMatcher) -> list[int]:
        bits = np.zeros(-(-self.size // 32), dtype=np.int32)
        matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        assert not matcher.is_error(), matcher.get_error()
        mask = np.unpackbits(bits.view(np.uint8), count=self.size, bitorder="little")
        return [int(token) for token in np.flatnonzero(mask) if token != END]

    def _text(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=False)

    @functools.cached_property
    def _closing(self) -> frozenset[int]:
        """The tokens of one character that end strings, objects, arrays, numbers and marks."""
        encoded = (self.tokenizer.encode(char, add_special_tokens=False).ids for char in '"}]<>/\n,')
        return frozenset({tokens[0] for tokens in encoded} | set(self.ids.values()))


@functools.cache
def plain_masks() -> Masks:
    """Masks of the embedded pair's tokenizer as it is."""
    return Masks()


# ------------------------------------------------------------------------------------------------------------ values

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x7f")) | st.text("<>/{}\"'\\\n =x_[]:,")
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=8,
)
