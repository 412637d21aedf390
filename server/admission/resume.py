"""Continuation of interrupted streams: whether what a caller has received fits the structure of its request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from engine.errors import GrammarFault, InvalidRequest
from engine.types import GRAMMAR_TOKENS, Grammar, ReceivedOutput


def require_fit(received: Sequence[ReceivedOutput], grammar: Grammar) -> Iterator[None]:
    """Check, in parts, that the tokens that were received have the structure of the request. Raises InvalidRequest."""
    for index, output in enumerate(received):
        field, state = f"resume.outputs[{index}].token_ids", grammar.start()
        for start in range(0, len(output.token_ids), GRAMMAR_TOKENS):
            part = output.token_ids[start : start + GRAMMAR_TOKENS]
            try:
                taken = state.advance(part)
            except GrammarFault as fault:
                raise InvalidRequest.of(field, str(fault)) from fault
            if taken < len(part):
                raise InvalidRequest.of(
                    f"{field}[{start + taken}]", f"is {part[taken]}, which does not fit the structure"
                )
            yield
