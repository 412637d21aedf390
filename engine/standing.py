"""How an engine stands: what may be asked of it at any time, and changes nothing."""

from __future__ import annotations

from engine.intake import Intake, Limits
from engine.proposers import Proposers
from engine.scheduler import Scheduler


class Standing:
    """Its limits, its load and its pages."""

    def __init__(self, limits: Limits, intake: Intake, proposers: Proposers, scheduler: Scheduler) -> None:
        self.limits = limits
        self._intake, self._proposers, self._scheduler = intake, proposers, scheduler

    @property
    def vocab_size(self) -> int:
        """Width of the target's logits; every token id is below it."""
        return self.limits.vocab_size

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and output together."""
        return self.limits.max_model_len

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The model's own end-of-text tokens."""
        return self.limits.eos_token_ids

    @property
    def default_proposer(self) -> str:
        """Who drafts for a request that names nobody."""
        return self._intake.default_proposer

    @property
    def proposer_names(self) -> tuple[str, ...]:
        """What a request may ask for as `speculation.proposer`."""
        return self._proposers.names

    @property
    def spec_gain(self) -> float:
        """Tokens per second of the last steps over what plain decoding would have made, as far as known."""
        return self._scheduler.gain

    @property
    def num_running(self) -> int:
        """Sequences that take part in steps."""
        return len(self._scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Sequences that hold no pages: new, or preempted."""
        return self._scheduler.num_waiting

    @property
    def has_room(self) -> bool:
        """Whether a request added now would start with the next step, as far as can be told."""
        return self._scheduler.has_room

    @property
    def spare_pages(self) -> int:
        """Free pages of the target's arena that no waiting sequence will take; below 0 where there are too few."""
        return self._scheduler.num_spare

    @property
    def page_size(self) -> int:
        """Tokens per page of the target's arena."""
        return self._scheduler.target_pool.page_size

    @property
    def total_pages(self) -> int:
        """Pages of the target's arena."""
        return self._scheduler.target_pool.num_pages

    @property
    def free_pages(self) -> int:
        """Pages of the target's arena that no sequence holds."""
        return self._scheduler.target_pool.num_free
