"""A machine with several proposers of known costs and acceptances, run by the engine's own control on a virtual clock.

Every text is a table of how often each proposer is right in it. What a step costs is a function of what is fed, and
control is told noisy times. There is no scheduler: nobody waits, and prompts are in the arena of the target.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from pilotfish.engine.control.adaptive import AdaptiveK
from pilotfish.engine.control.goodput import Found, Traits
from pilotfish.engine.control.step_time import StepFeedback
from pilotfish.engine.params import SpeculationMode
from pilotfish.engine.startup.calibrate import SHAPES
from pilotfish.engine.types import AUTO, Sequence
from tests import fakes
from tests.clockwork import BUDGET, MOST, Costs, expected


@dataclass(frozen=True)
class Right:
    """How often a proposer's drafts are right in a text; of a lookup, how often it finds some, and after what match."""

    chance: float
    finds: float = 1.0
    match: int = 0


@dataclass(frozen=True)
class Drafts:
    """A proposer. Its passes cost `share` of a draft model's; a share of 0: it looks up."""

    share: float
    is_parallel: bool = False
    reads: bool = True  # it has K/V of its own, and reads what it has not seen


EVERYONE: Mapping[str, Drafts] = {
    "model": Drafts(1.0),
    "eagle": Drafts(0.5),
    "block": Drafts(1.0, is_parallel=True),
    "suffix": Drafts(0.0, reads=False),
}
Text = Mapping[str, Right]
_LOOKUP_SECONDS = 0.00003


class Crossroads:
    """Sequences that are followed by others when they end; `names`: the proposers that control may choose."""

    def __init__(
        self,
        costs: Costs,
        text: Text,
        names: tuple[str, ...] = tuple(EVERYONE),
        *,
        batch: int = 1,
        output: int = 256,
        mode: SpeculationMode = SpeculationMode.AUTO,
        most: int = MOST,
        seed: int = 0,
    ) -> None:
        self.costs, self.text, self.names, self.batch, self.output, self.most = costs, text, names, batch, output, most
        self.mode = mode
        self.random, self._count = np.random.default_rng(seed), 0
        self.control = AdaptiveK({name: self._traits(name) for name in names})
        self.sequences: list[Sequence] = []
        self.books = np.zeros(3)  # tokens, seconds, and those of plain steps
        self.asked: dict[str, int] = dict.fromkeys(names, 0)  # drafts, by proposer
        self._lookups = dict.fromkeys(EVERYONE, 0)
        self._runs: dict[tuple[Sequence, str], tuple[int, int, bool]] = {}  # length then, right drafts, if any at all
        self._warm_up()

    def rate(self, steps: int) -> float:
        """Tokens per second over plain decoding's, of so many steps."""
        self.books = np.zeros(3)
        for _ in range(steps):
            self.step()
        tokens, seconds, plain = self.books
        return float(tokens / seconds / (self.batch * steps / plain))

    def step(self) -> None:
        while len(self.sequences) < self.batch:
            self.sequences.append(self._sequence())
        limits = [max(0, min(self.most, s.max_len - len(s.tokens) - 1)) for s in self.sequences]
        self._run(self.control.choose(self.sequences, limits, BUDGET, 0))
        for sequence in [s for s in self.sequences if len(s.tokens) >= s.max_len - 1]:
            self.sequences.remove(sequence)
            self.control.end(sequence)

    def _run(self, chosen: list[int]) -> None:
        lengths = [len(s.tokens) for s in self.sequences]
        drafted = [k and self._num_made(s, k) for s, k in zip(self.sequences, chosen, strict=True)]
        passes, drafting = self._draft(chosen)
        accepted = [min(self._run_of(s, s.drafter)[0], k) for s, k in zip(self.sequences, drafted, strict=True)]
        n, context = len(lengths), float(sum(lengths))
        attended = float(sum(length * (1 + k) for length, k in zip(lengths, drafted, strict=True)))
        target = self._target(n, n + sum(drafted), context, attended)
        # What is expected of so many drafts, so that the books know no luck.
        pairs = zip(self.sequences, drafted, strict=True)
        made = sum(expected(self.text[s.drafter].chance, k) for s, k in pairs)
        self.books += (made, drafting + target, self._target(n, n, context, context))
        for sequence, kept in zip(self.sequences, accepted, strict=True):
            sequence.tokens += [1] * (kept + 1)
            sequence.rollback(len(sequence.tokens))
        done = [self._measured(seconds) for seconds in (drafting, target)]
        self.control.learn(StepFeedback(self.sequences[:], lengths, chosen, drafted, accepted, passes, *done))

    def _draft(self, chosen: list[int]) -> tuple[list[tuple[int, int]], float]:
        """The passes of each proposer that is asked, and the seconds that drafting takes."""
        passes, seconds = list[tuple[int, int]](), 0.0
        for name in self.names:
            mine = [(s, k) for s, k in zip(self.sequences, chosen, strict=True) if k and s.drafter == name]
            self.asked[name] += sum(k for _, k in mine)
            drafts = EVERYONE[name]
            if not drafts.share:
                seconds += _LOOKUP_SECONDS * len(mine)
                continue
            unseen = {s: len(s.tokens) - s.draft_of(name).kv_len if drafts.reads else 1 for s, _ in mine}
            for depth in range(min(1, len(mine)) if drafts.is_parallel else max((k for _, k in mine), default=0)):
                now = [(s, k) for s, k in mine if k > depth]
                rows = sum((k if drafts.is_parallel else 0) + (1 if depth else unseen[s]) for s, k in now)
                context = float(sum(len(s.tokens) for s, _ in now))
                seconds += drafts.share * self.costs.draft(len(now), rows, context, context)
                passes.append((len(now), rows))
            for sequence, _ in mine:
                sequence.draft_of(name).advance(len(sequence.tokens))
        return passes, seconds

    def _num_made(self, sequence: Sequence, k: int) -> int:
        _, is_any = self._run_of(sequence, sequence.drafter)
        return k if EVERYONE[sequence.drafter].share or is_any else 0

    def _run_of(self, sequence: Sequence, name: str) -> tuple[int, bool]:
        """How many drafts of this proposer are right at this place, and whether it has any."""
        length, kind = len(sequence.tokens), self.text[name]
        if self._runs.get((sequence, name), (0, 0, False))[0] != length:
            right = int(self.random.geometric(1 - kind.chance)) - 1
            self._lookups[name] += 1  # it finds something evenly often, so that the books know no luck
            is_any = int(self._lookups[name] * kind.finds) > int((self._lookups[name] - 1) * kind.finds)
            self._runs[sequence, name] = length, right, is_any
        return self._runs[sequence, name][1:]

    def _find(self, name: str, sequence: Sequence, k: int) -> Found:
        """Every token of a text is 1."""
        right, is_any = self._run_of(sequence, name)
        return Found(tuple(int(i < right) for i in range(k)), self.text[name].match) if is_any else Found()

    def _traits(self, name: str) -> Traits:
        drafts = EVERYONE[name]
        if not drafts.share:
            return Traits(find=lambda sequence, k: self._find(name, sequence, k))
        return Traits(
            num_unseen=(lambda s: max(0, len(s.tokens) - 2 - s.draft_of(name).kv_len)) if drafts.reads else None,
            is_parallel=drafts.is_parallel,
        )

    def _sequence(self) -> Sequence:
        self._count += 1
        prompt = [1] * 64
        settings = {"k": self.most, "mode": self.mode, "proposer": AUTO, "max_len": len(prompt) + self.output + 1}
        one = fakes.sequence(prompt, name=str(self._count), **settings)
        one.candidates, one.choice = self.names, self.names[0]
        return one

    def _warm_up(self) -> None:
        """As the server does before it takes requests: each shape plainly, or with the drafts of each proposer."""
        text, mode, batch = self.text, self.mode, self.batch
        self.text = {name: replace(right, chance=0.6) for name, right in text.items()}
        self.mode = SpeculationMode.FIXED
        with self.control.practising():
            for shape in SHAPES:
                for name in self.names if shape.num_draft else self.names[:1]:
                    self.sequences = [self._sequence() for _ in range(shape.batch)]
                    for sequence in self.sequences:
                        sequence.candidates, sequence.choice = (), name
                    for _ in range(shape.steps):
                        self._run([shape.num_draft] * shape.batch)
                    for sequence in self.sequences:
                        self.control.forget(sequence)
        self.text, self.mode, self.batch, self.sequences = text, mode, batch, []

    def _target(self, n: int, rows: float, context: float, attended: float) -> float:
        return self.costs.overhead + self.costs.target(n, rows, context, attended)

    def _measured(self, seconds: float) -> float:
        noisy = seconds * self.random.lognormal(0, 0.2)
        return noisy * (5 if self.random.random() < 0.02 else 1)
