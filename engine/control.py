"""Who chooses how many drafts each sequence gets, and what is told about the outcome; the simplest such choice."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Protocol

from engine.gain import Gain
from engine.goodput import Load
from engine.probing import Probing
from engine.types import Sequence, SpeculationMode

_NEAR = 4  # tokens that a draft model has missed are fed in a pass that hardly costs more for them


@dataclass(frozen=True, slots=True)
class Round:
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
    is_probe: bool = False  # what control said of this choice when it made it (`Late`)

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return self.draft_seconds + self.other_seconds

    @property
    def load(self) -> Load:
        """What the target was fed."""
        load = Load.of(self.lengths, self.drafted)
        return load if self.rows is None else replace(load, rows=self.rows)


class Control(Protocol):
    """Chooses K."""

    @property
    def gain(self) -> Gain:
        """How much faster than plain decoding it has been."""
        ...

    def choose(self, sequences: Seq[Sequence], limits: Seq[int], budget: int, prompt_rows: int) -> list[int]:
        """K of each sequence in the step that is being planned, at most its limit; they share the budget."""
        ...

    def learn(self, done: Round) -> None:
        """What became of it."""
        ...

    def begin(self) -> None:
        """What was learned so far was practice: its costs are true, its drafts and its gain are not."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """The sequence is over."""
        ...


class FixedK:
    """As many as each may have, whatever they cost."""

    is_probing = False

    def __init__(self) -> None:
        self.gain, self.probing = Gain(), Probing()  # nothing of which is ever spent

    def choose(self, sequences: Seq[Sequence], limits: Seq[int], budget: int, prompt_rows: int) -> list[int]:
        """First come, first served."""
        return within(limits, budget)

    def learn(self, done: Round) -> None:
        """Nothing to learn."""

    def begin(self) -> None:
        """Nothing to forget."""

    def forget(self, sequence: Sequence) -> None:
        """Nothing to forget."""


class Probes(Control, Protocol):
    """A control that now and then asks for drafts only to find out whether they would pay."""

    probing: Probing


class RoundControl(Control, Protocol):
    """Chooses K for rounds."""

    @property
    def is_probing(self) -> bool:
        """Whether what was chosen last is only to find out whether drafts would pay."""
        ...


class Late:
    """A control that hears of a choice only when the next one is made already, as of rounds on the device.

    What it is told of a round is said to be of the kind that the round was. And where it wants a plain step after
    steps with drafts, the choice before holds once more until that step is known: it would want a second one.
    """

    def __init__(self, inner: Probes) -> None:
        self._inner, self.is_probing = inner, False
        self._last: dict[Sequence, int] = {}  # chosen last, as far as there were drafts
        self._held: dict[Sequence, int] | None = None  # the same, from before the plain step that is not known yet

    @property
    def gain(self) -> Gain:
        """The inner one's."""
        return self._inner.gain

    def choose(self, sequences: Seq[Sequence], limits: Seq[int], budget: int, prompt_rows: int) -> list[int]:
        """The inner one's choice, or the one before."""
        if self._held is not None:
            held, self._held, self.is_probing = self._held, None, False
            return within([min(n, held.get(s, 0)) for s, n in zip(sequences, limits, strict=True)], budget)
        chosen = self._inner.choose(sequences, limits, budget, prompt_rows)
        self.is_probing = self._inner.probing.is_now
        if not any(chosen):
            self._held = self._last or None
        drafts = any(chosen) and not self.is_probing
        self._last = dict(zip(sequences, chosen, strict=True)) if drafts else {}
        return chosen

    def learn(self, done: Round) -> None:
        """As the inner one, whose latest choice was another."""
        probing = self._inner.probing
        latest, probing.is_now = probing.is_now, done.is_probe
        self._inner.learn(done)
        probing.is_now = latest

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
