"""Structures over token ids by hand: the output is one of some sequences. No library, no text but the choices'."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from pilotfish.engine.errors import InvalidRequest
from pilotfish.engine.params import Guided
from tests.engine.text.test_codec import CODEC
from tests.server.fake_engine import EOS


class ChoiceState:
    """How far one output is on its way to one of `choices`."""

    def __init__(self, choices: Sequence[tuple[int, ...]]) -> None:
        self.choices, self.taken = choices, []

    def fill(self, mask) -> None:
        mask[:] = False
        for choice in self._open():
            mask[choice[len(self.taken)] if len(choice) > len(self.taken) else EOS] = True

    def advance(self, tokens: Sequence[int]) -> int:
        for count, token in enumerate(tokens):
            if token == EOS and any(len(choice) == len(self.taken) for choice in self._open()):
                return count + 1
            self.taken.append(token)
            if not self._open():
                self.taken.pop()
                return count
        return len(tokens)

    def rollback(self, num_tokens: int) -> None:
        del self.taken[len(self.taken) - num_tokens :]

    def _open(self) -> list[tuple[int, ...]]:
        return [choice for choice in self.choices if list(choice[: len(self.taken)]) == self.taken]


class FakeCompiler:
    """Knows choices alone, and the JSON Schema "{}", whose only document is `{}`. Waits for `gate`."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.threads: set[int] = set()
        self.asked: list[Guided] = []
        self.kept: dict[Guided, FakeCompiler.Grammar] = {}

    def ready(self, guided: Guided) -> FakeCompiler.Grammar | None:
        """As `GrammarCompiler.ready`."""
        return self.kept.get(guided)

    def compile(self, guided: Guided, seconds: float | None = None) -> FakeCompiler.Grammar:
        """As `GrammarCompiler.compile`."""
        if guided not in self.kept:
            self.kept[guided] = self(guided)
        return self.kept[guided]

    def __call__(self, guided: Guided) -> FakeCompiler.Grammar:
        self.threads.add(threading.get_ident())
        self.asked.append(guided)
        assert self.gate.wait(30)
        if guided.json_schema is not None:
            return self.Grammar(["{}"])
        if guided.choice is None:
            raise InvalidRequest.of("guided.regex", f"is {guided.regex!r}, which this fake does not know")
        return self.Grammar(guided.choice)

    class Grammar:
        """One of some texts."""

        def __init__(self, texts: Sequence[str]) -> None:
            self.choices = [CODEC.encode(text) for text in texts]

        def start(self) -> ChoiceState:
            return ChoiceState(self.choices)
