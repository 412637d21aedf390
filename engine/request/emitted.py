"""Validation of what a continued request has emitted before. Knows no model."""

from __future__ import annotations

from collections.abc import Iterator

from engine.errors import Violation
from engine.types import Request

FIELD = "resume.outputs"


def emitted_violations(request: Request, vocab_size: int, max_len: int) -> Iterator[Violation]:
    """All violations of `request.emitted`; `max_len` is the most tokens of prompt and output together."""
    emitted, n = request.emitted, request.sampling.n
    if not emitted:
        return
    if len(emitted) != n:
        yield Violation(FIELD, f"has {len(emitted)} outputs; expected {n}, as sampling.n says")
    if request.sampling.seed is None:
        yield Violation("sampling.seed", "is missing; a request that is continued needs the seed with which it began")
    if all(output.has_ended for output in emitted):
        yield Violation(FIELD, f"has {len(emitted)} outputs, which are all finished: there is nothing to continue")
    room = max_len - len(request.token_ids)
    for index, output in enumerate(emitted):
        tokens = output.token_ids
        if len(tokens) > max(0, room):
            yield Violation(f"{FIELD}[{index}].token_ids", f"has {len(tokens)} tokens; the output has room for {room}")
        elif tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
            wrong = next(i for i, token in enumerate(tokens) if not 0 <= token < vocab_size)
            where = f"{FIELD}[{index}].token_ids[{wrong}]"
            yield Violation(where, f"is {tokens[wrong]}; expected 0 to {vocab_size - 1}")
