"""A request's way in: what is refused, and what a request that leaves things open gets."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from engine.config import EngineConfig
from engine.errors import Unsupported
from engine.types import MAX_SEED, KVCursor, Request, Sequence, Speculation, SpeculationMode


@dataclass(frozen=True, slots=True)
class Limits:
    """What the models and the arena allow; fixed at load."""

    vocab_size: int  # width of the target's logits
    max_model_len: int  # most tokens of prompt and output together
    eos_token_ids: frozenset[int] = frozenset()
    target_border: int | None = None  # longest sequence of the model's first rotary table; None: it has but one
    draft_border: int | None = None


@dataclass(frozen=True, slots=True)
class Intake:
    """Turns requests into sequences. Holds nothing that changes, so any thread may ask it."""

    config: EngineConfig
    limits: Limits
    proposers: tuple[str, ...]  # names that a request may ask for

    @property
    def default_proposer(self) -> str:
        """The proposer of a request that names none."""
        return self.config.proposer or ("model" if "model" in self.proposers else "ngram")

    def check(self, request: Request) -> None:
        """Refuse what cannot be served.

        Raises:
            InvalidRequest: with every violation at once.
            Unsupported: a proposer that this server does not have.
        """
        request.check(self.limits.vocab_size, self.limits.max_model_len)
        name = request.speculation.proposer
        if name is not None and name not in self.proposers:
            raise Unsupported(f"speculation.proposer is {name!r}; this server has {', '.join(self.proposers)}")

    def open(self, request: Request) -> Sequence:
        """The sequence of a request that `check` let through."""
        wanted, length = request.sampling.seed, len(request.token_ids)
        return Sequence(
            request=request,
            seed=secrets.randbelow(MAX_SEED + 1) if wanted is None else wanted,
            speculation=self._speculation(request),
            max_len=request.max_len(self.limits.max_model_len),
            tokens=list(request.token_ids),
            target=KVCursor.of(self.limits.target_border, length),
            draft=KVCursor.of(self.limits.draft_border, length),
        )

    def _speculation(self, request: Request) -> Speculation:
        """The request's wishes over the server's defaults; the server's limit on drafts holds for all."""
        asked, config = request.speculation, self.config
        mode = asked.mode or config.speculation
        wanted = config.num_draft_tokens if asked.num_draft_tokens is None else asked.num_draft_tokens
        proposer = "none" if mode is SpeculationMode.OFF else asked.proposer or self.default_proposer
        return Speculation(
            mode=mode,
            num_draft_tokens=0 if proposer == "none" else min(wanted, config.num_draft_tokens),
            proposer=proposer,
            verification=asked.verification or config.verification,
        )
