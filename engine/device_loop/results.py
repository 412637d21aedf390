"""What a round on the device brings, on its way to the host. Knows no model and launches nothing."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from engine.control.controller import StepFeedback
from engine.device_loop.round import RoundOutput
from engine.kernels.args import UNSOUND
from engine.sampling.verification import VerifyOutput
from engine.scheduler import Work
from engine.stats import Clock, Forward
from engine.types import Sequence

Progress = Callable[[str], None]  # is told what loading is at


def untold(_: str) -> None:
    """Nobody hears of it."""


@dataclass(slots=True, eq=False)
class DeviceSequence:
    """A sequence that stands on the device."""

    sequence: Sequence
    slot: int
    num_draft: int = 0  # as its slot has it; a round's K bounds it too
    draft_caught_up: bool = False  # the draft's K/V reaches to all tokens but the last two, those in flight included


@dataclass(frozen=True, slots=True)
class SequenceResult:
    """What a round brought one sequence."""

    sequence: Sequence
    num_draft: int
    outcome: VerifyOutput


@dataclass(frozen=True, slots=True)
class RoundResult:
    """What a round brought those who are still there, and what control learns from it."""

    results: tuple[SequenceResult, ...]
    feedback: StepFeedback
    forwards: tuple[Forward, ...]


@dataclass(frozen=True, slots=True)
class RoundEntry:
    """One sequence's part in a round, as it was when that was launched."""

    member: DeviceSequence
    length: int
    asked: int
    num_draft: int
    draft_caught_up: bool

    def settle(self, row: list[int]) -> SequenceResult:
        """Move the sequence's cursors past its tokens of the round; `row` is its row of the results."""
        *drawn, num_fresh, num_accepted, ended = row
        assert num_fresh or ended, "the device says that a live sequence had ended"
        problem = "the model's output was not a number" if ended == UNSOUND else None
        sequence = self.member.sequence
        sequence.in_flight -= self.num_draft + 1
        taken = max(0, min(self.num_draft, sequence.max_len - len(sequence.tokens) - 1))  # as the device knew
        length = len(sequence.tokens) + num_fresh
        sequence.target.advance(length - 1)
        if self.draft_caught_up:
            sequence.draft.advance(max(sequence.draft.kv_len, length - 2))
        return SequenceResult(sequence, taken, VerifyOutput(tuple(drawn[:num_fresh]), num_accepted, problem))


class Rounds(Protocol):
    """What a step asks of `round_loop.RoundLoop`."""

    @property
    def name(self) -> str:
        """Of this way of decoding."""
        ...

    def takes(self, sequence: Sequence) -> bool:
        """Whether a new sequence decodes here."""
        ...

    def launch(self, works: Seq[Work]) -> None:
        """Launch a round of these and nobody else."""
        ...

    def read(self) -> list[RoundResult]:
        """What came of all rounds but the one just launched."""
        ...

    def leave(self, sequence: Sequence) -> None:
        """Take a sequence out, if it is here."""
        ...

    def record(self, progress: Progress, sizes: Seq[int] | None, ks: Seq[int] | None) -> None:
        """Make ready for rounds of every size and K, or of these alone, so that none is recorded in a request."""
        ...

    def rest(self) -> None:
        """Nobody asks anything: there is a moment to make up for what was not ready."""
        ...


class NoRounds:
    """No sequence is decoded on a device: every one takes part in plain steps."""

    name = "plain"

    def takes(self, sequence: Sequence) -> bool:
        """No."""
        return False

    def launch(self, works: Seq[Work]) -> None:
        """There is nobody to launch a round for."""
        assert not works, "a sequence waits for a round, and there are no rounds"

    def read(self) -> list[RoundResult]:
        """Nothing."""
        return []

    def leave(self, sequence: Sequence) -> None:
        """Nobody is here."""

    def record(self, progress: Progress, sizes: Seq[int] | None, ks: Seq[int] | None) -> None:
        """There is nothing to record."""

    def rest(self) -> None:
        """Nothing is missed."""


class DeviceTimer:
    """Moments on the device's own clock, which nobody waits for."""

    def __init__(self, device: torch.device, clock: Clock) -> None:
        self._is_cuda, self._clock = device.type == "cuda", clock
        self._moments: list[float] = []
        self._events: list[torch.cuda.Event] = []

    def mark(self) -> None:
        """Now; on a GPU, when it comes to it."""
        if self._is_cuda:
            self._events.append(torch.cuda.Event(enable_timing=True))
            self._events[-1].record()
        else:
            self._moments.append(self._clock())

    def seconds(self) -> list[float]:
        """Between one mark and the next; the device must have passed them all."""
        if self._is_cuda:
            return [a.elapsed_time(b) / 1e3 for a, b in zip(self._events, self._events[1:], strict=False)]
        return [b - a for a, b in zip(self._moments, self._moments[1:], strict=False)]


@dataclass(slots=True)
class PendingRound:
    """One round's: copied behind the round, waited for when it is read."""

    k: int
    size: int  # places of the batch
    entries: list[RoundEntry]  # in the order of the places
    fed: list[int]  # tokens that the draft was fed first, of each sequence that had to catch up
    timer: DeviceTimer  # before drafting, between that and verification, behind it
    brought: RoundOutput
    _rows: Tensor = field(init=False)  # [B, K + 4]: what was drawn; how many are fresh and accepted; whether it ended
    _event: torch.cuda.Event | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        made = self.brought.committed
        packed = [self.brought.drawn, torch.stack([made.num_fresh, made.num_accepted, made.ended], 1)]
        self._rows = torch.cat(packed, 1)
        if self._rows.is_cuda:
            pinned = torch.empty(self._rows.shape, dtype=torch.int64, pin_memory=True)
            self._rows, self._event = pinned.copy_(self._rows, non_blocking=True), torch.cuda.Event()
            self._event.record()

    def read(self) -> list[list[int]]:
        """Of each place."""
        if self._event is not None:
            self._event.synchronize()
        return self._rows.tolist()

    def draft_passes(self, places: int) -> list[tuple[int, int]]:
        """Sequences and tokens of each pass of the draft model; the first of a round feeds two tokens."""
        passes = [(places, 2 * places if i == 0 else places) for i in range(self.k)]
        return [*passes, (len(self.fed), sum(self.fed))] if self.fed else passes

    def forwards(self) -> tuple[Forward, ...]:
        """The same and the target's, without idle places."""
        count = len(self.entries)
        drafting = [Forward("draft", *passed) for passed in self.draft_passes(count)]
        return *drafting, Forward("verify", count, count + sum(entry.num_draft for entry in self.entries))
