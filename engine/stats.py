"""The output of a step: events, measurements and changes of the prefix cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from pilotfish.engine.types import TokenEvent

ForwardKind = Literal["verify", "prefill", "draft"]
Clock = Callable[[], float]  # seconds, monotonic


@dataclass(frozen=True, slots=True)
class Forward:
    """The part of a model call for one kind of work: number of sequences and of tokens.

    A target pass that verifies some sequences and prefills others reports two of these.
    """

    kind: ForwardKind
    sequences: int
    tokens: int


class EngineLoad(NamedTuple):
    """The load of an engine."""

    num_running: int  # sequences that take part in steps
    num_waiting: int  # sequences without pages: new, or preempted
    free_pages: int  # free pages of the target's arena
    spare_pages: int  # those that no waiting sequence will take; negative if there are too few
    spec_gain: float = 1.0  # estimated tokens per second in recent steps relative to plain decoding


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """Statistics of one step. Durations in seconds; counters of this step only."""

    forwards: tuple[Forward, ...] = ()
    phase_seconds: Mapping[str, float] = field(
        default_factory=dict
    )  # plan, launch, propose, forward, verify, commit, land
    device_seconds: float = 0.0  # of the rounds on the device that were read in this step, by its own clock
    rounds: int = 0  # sequences whose drafts were verified
    drafted: int = 0
    accepted_per_position: tuple[int, ...] = ()
    sequences_per_num_draft: tuple[int, ...] = ()  # number of sequences verified with 0, 1, ... drafts
    generated_tokens: int = 0
    prompt_tokens: int = 0  # prompt (or recomputed) tokens fed to the target
    preempted: int = 0
    prefix_lookups: int = 0  # prompt tokens of admitted sequences
    prefix_hits: int = 0  # prompt tokens whose K/V was in the prefix cache
    draft_failures: int = 0
    threads: int = 0  # of our C code in the last pass; 0 if it is not used
    spec_gain: float = 1.0  # estimated tokens per second in recent steps relative to plain decoding
    # Estimates: of a step without drafts with 1, 2, 4, ... decoding sequences, and of a prompt token. Empty and 0:
    # unknown.
    decode_seconds: tuple[float, ...] = ()
    prompt_token_seconds: float = 0.0
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0  # share of the target's pages in use, 0 to 1

    @property
    def accepted(self) -> int:
        """Accepted drafts in this step."""
        return sum(self.accepted_per_position)


class CacheChange(NamedTuple):
    """A page was entered into the prefix cache, or, without `tokens`, removed."""

    number: int  # of the page in the prefix cache
    before: int | None = None  # number of its predecessor; None: it is the beginning of a text
    salt: Any = None  # of a page without a predecessor
    tokens: tuple[int, ...] = ()


class StepOutput(NamedTuple):
    """Events, at most one per output and pass, and the measurements of a step.

    The engine's process also sends events that need no step, such as those of ordered ends: then `stats` is None.
    """

    events: tuple[TokenEvent, ...]
    stats: StepStats | None
    load: EngineLoad  # after the step
    num_orders: int = 0  # orders that the engine's process had executed
    cache_changes: tuple[CacheChange, ...] = ()  # if they are watched


class Stopwatch:
    """Sums up seconds per named phase, with an injected clock."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time spent inside to `name`."""
        start = self._clock()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + self._clock() - start
