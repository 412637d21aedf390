"""What the masks of a schema accept, byte by byte."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from pilotfish.engine.text.guided import json_rule
from pilotfish.engine.text.matcher import parser_limits

_BYTES = LLTokenizer("byte")


class Accepted:
    """The texts that a schema accepts. ValueError: it is refused."""

    def __init__(self, schema: Any, **options: bool) -> None:
        text = schema if isinstance(schema, str) else json.dumps(schema)
        source = LLMatcher.grammar_from_lark(
            f'start: {json_rule(text, **options)}\n%llguidance {{"no_forcing": true}}\n'
        )
        self._matcher = LLMatcher(_BYTES, source, log_level=0, limits=parser_limits())
        assert not self._matcher.is_error(), self._matcher.get_error()

    def __contains__(self, text: str) -> bool:
        matcher, tokens = self._matcher.deep_copy(), list(text.encode())
        found = matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
        assert not matcher.is_error(), matcher.get_error()
        return found

    def walk(self, rng: random.Random, most: int = 400) -> str | None:
        """A random text; None if it does not end after `most` bytes."""
        matcher, tokens = self._matcher.deep_copy(), list[int]()
        while len(tokens) < most:
            bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
            allowed = np.unpackbits(bits, bitorder="little")[:256].nonzero()[0].tolist()
            allowed = [token for token in allowed if token < 128] or allowed
            if matcher.is_accepting() and (not allowed or rng.random() < 0.5):
                return bytes(tokens).decode()
            closing = [token for token in allowed if chr(token) in ']}"'] if rng.random() < 0.4 else []
            tokens.append(rng.choice(closing or allowed))
            assert matcher.try_consume_tokens(tokens[-1:]) == 1
        return None
