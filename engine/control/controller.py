"""Who chooses how many drafts each sequence gets, and what is told about the outcome; the simplest such choice."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any, Protocol

from engine.control.goodput import BatchLoad
from engine.control.speedup import Speedup
from engine.params import SpeculationMode
from engine.types import Sequence

_NEAR = 4  # tokens that a draft model has missed are fed in a pass that hardly costs more for them


@dataclass(frozen=True, slots=True)
class StepFeedback:
    """What a step did for sequences that fed their newest token, and the seconds it took."""

    sequences: Seq[Sequence]
    lengths: Seq[int]  # when the step was planned
    asked: Seq[int]
    drafted: Seq[int]
    accepted: Seq[int]
    draft_passes: Seq[tuple[int, int]]  # sequences and tokens of each pass of a draft model
    draft_seconds: float
    other_seconds: float
    has_prompts: bool  # others fed prompts in the same pass
    rows: int | None = None  # of the target's pass, where some were fed that count for nobody

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return self.draft_seconds + self.other_seconds

    @property
    def load(self) -> BatchLoad:
        """What the target was fed."""
        load = BatchLoad.of(self.lengths, self.drafted)
        return load if self.rows is None else replace(load, rows=self.rows)


class Control(Protocol):
    """Chooses K."""

    @property
    def gain(self) -> Speedup:
        """How much faster than plain decoding it has been."""
        ...

    def choose(self, sequences: Seq[Sequence], limits: Seq[int], budget: int, prompt_rows: int) -> list[int]:
        """K of each sequence in the step that is being planned, at most its limit; they share the budget."""
        ...

    def learn(self, done: StepFeedback) -> None:
        """What became of it."""
        ...

    def begin(self) -> None:
        """What was learned so far was practice: its costs and its priors stay, its gain does not."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """The sequence is over."""
        ...

    def state(self) -> dict[str, Any]:
        """What outlives the process, as JSON can hold it."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Begin with what an earlier process knew. Raises ValueError, KeyError or TypeError where it is no `state`."""
        ...


class FixedK:
    """As many as each may have, whatever they cost."""

    is_exploring = False

    def __init__(self) -> None:
        self.gain = Speedup()

    def choose(self, sequences: Seq[Sequence], limits: Seq[int], budget: int, prompt_rows: int) -> list[int]:
        """First come, first served."""
        return within(limits, budget)

    def learn(self, done: StepFeedback) -> None:
        """Nothing to learn."""

    def begin(self) -> None:
        """Nothing to forget."""

    def forget(self, sequence: Sequence) -> None:
        """Nothing to forget."""

    def state(self) -> dict[str, Any]:
        """Nothing to keep."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Nothing to begin with."""


class Explorer(Control, Protocol):
    """A control that now and then asks for drafts only to find out whether they would pay."""

    @property
    def is_exploring(self) -> bool:
        """Whether the latest choice is such a one."""
        ...


class DelayedFeedback:
    """Adapts a control to delayed feedback: it hears of a choice only when the next one is made, as of rounds.

    After a requested plain step the choice before it repeats once, until that step is known: else a second one would
    be requested.
    """

    def __init__(self, inner: Explorer) -> None:
        self._inner = inner
        self._last: dict[Sequence, int] = {}  # chosen last, as far as there were drafts
        self._held: dict[Sequence, int] | None = None  # the same, from before the plain step that is not known yet

    @property
    def gain(self) -> Speedup:
        """The inner one's."""
        return self._inner.gain

    def choose(self, sequences: Seq[Sequence], limits: Seq[int], budget: int, prompt_rows: int) -> list[int]:
        """The inner one's choice, or the one before."""
        if self._held is not None:
            held, self._held = self._held, None
            return within([min(n, held.get(s, 0)) for s, n in zip(sequences, limits, strict=True)], budget)
        chosen = self._inner.choose(sequences, limits, budget, prompt_rows)
        if not any(chosen):
            self._held = self._last or None
        drafts = any(chosen) and not self._inner.is_exploring
        self._last = dict(zip(sequences, chosen, strict=True)) if drafts else {}
        return chosen

    def learn(self, done: StepFeedback) -> None:
        """As the inner one."""
        self._inner.learn(done)

    def begin(self) -> None:
        """As the inner one."""
        self._inner.begin()
        self._last, self._held = {}, None

    def forget(self, sequence: Sequence) -> None:
        """The sequence is over."""
        self._inner.forget(sequence)
        self._last.pop(sequence, None)
        if self._held is not None:
            self._held.pop(sequence, None)

    def state(self) -> dict[str, Any]:
        """As the inner one."""
        return self._inner.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """As the inner one."""
        self._inner.restore(state)


def within(limits: Seq[int], budget: int) -> list[int]:
    """Limits [3, 3, 3], budget 5 -> [3, 2, 0]."""
    given = []
    for limit in limits:
        given.append(min(limit, budget))
        budget -= given[-1]
    return given


def levelled(sequences: Seq[Sequence], limits: Seq[int], chosen: Seq[int]) -> list[int]:
    """What was `chosen` for each, made fit for a round on the device, whose rows are those of its largest K for all.

    AUTO gets as many rows as were found worth it, spread evenly, and drafts wherever rows are there anyway; but whose
    draft model would have much to read first gets some only if they were chosen for it. FIXED stays as it is.
    [4, 4, 0, 0] -> [2, 2, 2, 2]; [1, 0, 0, 0], a probe -> [1, 1, 1, 1].
    """
    free = [i for i, s in enumerate(sequences) if limits[i] and s.speculation.mode is SpeculationMode.AUTO]
    wanted, given = sum(chosen[i] for i in free), list(chosen)
    for i in free:
        given[i] = 0
    depth = max(1, round(wanted / len(free))) if wanted else 0
    widest = max([depth, *given], default=0)
    for i in free:
        cursor, length = sequences[i].draft, len(sequences[i].tokens)
        if chosen[i] or length - 2 - cursor.kv_len <= _NEAR:
            given[i] = min(limits[i], widest)
    return given
