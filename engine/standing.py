"""How an engine stands: what may be asked of it at any time, and changes no request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine import learned
from engine.control import Control
from engine.intake import Intake, Limits
from engine.proposers import Proposers
from engine.scheduler import Scheduler
from engine.stats import Clock

if TYPE_CHECKING:
    from engine.config import EngineConfig

_KEEP_EVERY = 60.0  # seconds, in which what is learned may be lost


class Standing:
    """Its limits, its load, its pages, and what it has learned."""

    def __init__(
        self,
        config: EngineConfig,
        limits: Limits,
        intake: Intake,
        proposers: Proposers,
        scheduler: Scheduler,
        clock: Clock,
    ) -> None:
        self.config, self.limits, self._clock = config, limits, clock
        self._intake, self._proposers, self._scheduler = intake, proposers, scheduler
        self._keeps_at: float | None = None  # when what was learned is kept again, if it is

    def recall(self) -> bool:
        """Begin with what an earlier process learned of this pair on this machine; False if there is nothing."""
        return learned.recall(self.config, self._controls)

    def keep_learned(self) -> None:
        """Leave what control knows to a later process, now and whenever this one rests a while later."""
        learned.keep(self.config, self._controls)
        self._keeps_at = self._clock() + _KEEP_EVERY

    @property
    def _controls(self) -> dict[str, Control]:
        return {"plain": self._scheduler.control, "rounds": self._scheduler.round_control}

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
