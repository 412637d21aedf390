"""The errors of the engine. Each docstring states whether the error is expected in a healthy server."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


class PilotfishError(Exception):
    """Base of Pilotfish's own errors."""


@dataclass(frozen=True, slots=True)
class ContextExcess:
    """A request for more tokens than the context has.

    Args:
        max_model_len: tokens of the context.
        prompt_tokens: tokens of the prompt; with `is_bound` a lower bound, because the prompt was not encoded.
        max_prompt_tokens: maximum number of tokens of a prompt.
        output_tokens: tokens requested after it; 0 where the prompt itself is too long.
    """

    max_model_len: int
    prompt_tokens: int
    max_prompt_tokens: int
    output_tokens: int = 0
    is_bound: bool = False


@dataclass(frozen=True, slots=True)
class Violation:
    """One violation of a request: `field` as the caller wrote it, `problem` with the offending value.

    `excess`: set if the context is too short, which callers handle by sending a shorter prompt.
    """

    field: str
    problem: str
    excess: ContextExcess | None = None

    def __str__(self) -> str:
        return f"{self.field} {self.problem}"


def shown(value: object, most: int = 80) -> str:
    """`repr(value)`, with its middle omitted if it is longer than `most` characters."""
    # Only the ends of a long text are formatted: `repr` of the whole could take seconds.
    text = f"{value[:most]}{value[-most:]}" if isinstance(value, str) and len(value) > 2 * most else value
    written = repr(text)
    half = (most - 1) // 2
    return written if len(written) <= most else f"{written[:half]}…{written[-half:]}"


def one_line(text: str, most: int = 300) -> str:
    """`text` as one line of at most `most` characters: control characters escaped, and the middle omitted if longer."""
    head = 2 * most // 3
    # An escaped character can have ten, so only the ends of a long text are escaped.
    ends = text if len(text) <= 2 * most else f"{text[:most]} {text[-most:]}"
    line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in " ".join(ends.split()))
    is_whole = ends is text and len(line) <= most
    return line if is_whole else f"{line[:head]}…{line[head + 1 - most :]}"


class InvalidRequest(PilotfishError):
    """Expected: the request is invalid. Contains all violations; nothing was queued."""

    def __init__(self, violations: Iterable[Violation]) -> None:
        self.violations = tuple(violations)
        assert self.violations, "an InvalidRequest without a violation"
        super().__init__("; ".join(map(str, self.violations)))

    @classmethod
    def of(cls, field: str, problem: str) -> InvalidRequest:
        return cls([Violation(field, problem)])


class Unsupported(PilotfishError):
    """Expected: the request is valid, but needs a feature that this server does not support."""


class DuplicateRequest(PilotfishError):
    """Expected: a live request already has this id."""


class ModelError(PilotfishError):
    """Expected: a checkpoint, or a pair, cannot be served; raised at load, never later.

    Its message is one short line, even if it quotes an untrusted file.
    """

    def __init__(self, problem: str) -> None:
        super().__init__(one_line(problem))


class GrammarFault(PilotfishError):
    """Expected: one output's grammar has reached a limit or a dead end. Only that request ends."""


class RankLost(PilotfishError):
    """Unexpected: a process that holds a shard of the target is gone. All ranks must be restarted."""
