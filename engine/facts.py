"""What of an engine does not change while it runs. Knows no request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from engine.request.intake import Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """Facts of a loaded engine. Its process sends them to the front ends as they are."""

    limits: Limits
    proposer_names: tuple[str, ...]  # what a request may ask for
    default_proposer: str  # of a request that names none
    page_size: int  # tokens per page of the target's arena
    total_pages: int
    loop: str  # how sequences decode where they can: `rounds` on the device, or `plain` steps
    dtype: str  # of the target's activations, keys and values
    device: str  # of the target


class WithFacts(Protocol):
    """Whatever has the facts of an engine; shorter names for some of them."""

    facts: EngineFacts

    @property
    def vocab_size(self) -> int:
        return self.facts.limits.vocab_size

    @property
    def max_model_len(self) -> int:
        return self.facts.limits.max_model_len

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self.facts.limits.eos_token_ids

    @property
    def proposer_names(self) -> tuple[str, ...]:
        return self.facts.proposer_names

    @property
    def default_proposer(self) -> str:
        return self.facts.default_proposer

    @property
    def page_size(self) -> int:
        return self.facts.page_size

    @property
    def total_pages(self) -> int:
        return self.facts.total_pages

    @property
    def dtype(self) -> str:
        return self.facts.dtype
