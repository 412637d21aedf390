"""Results of rounds on the device and their transfer to the host."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from pilotfish.engine.control.step_time import StepFeedback
from pilotfish.engine.kernels.args import UNSOUND, Committed
from pilotfish.engine.stats import Clock, Forward
from pilotfish.engine.step import Work
from pilotfish.engine.types import Sequence

Progress = Callable[[str], None]  # receives a message for each stage of loading


def no_progress(_: str) -> None:
    """Discard the message."""


@dataclass(slots=True, eq=False)
class DeviceSequence:
    """A sequence in a slot of the device."""

    sequence: Sequence
    slot: int
    num_draft: int = 0  # as stored in its slot; also bounded by the round's K
    draft_caught_up: bool = False  # the draft's K/V covers all tokens but the last two, tokens in flight included


@dataclass(frozen=True, slots=True)
class RoundResult:
    """Results of the sequences that have not left since the launch, and the feedback for control."""

    works: tuple[Work, ...]
    feedback: StepFeedback
    forwards: tuple[Forward, ...]


@dataclass(frozen=True, slots=True)
class RoundEntry:
    """One sequence's part in a round, as of its launch."""

    member: DeviceSequence
    work: Work
    num_draft: int  # at most the requested number
    draft_caught_up: bool

    def settle(self, row: list[int]) -> Work:
        """Move the sequence's cursors past its tokens of the round; `row` is its row of the results."""
        *drawn, num_fresh, num_accepted, ended = row
        assert num_fresh or ended, "the device reports that a live sequence had ended"
        problem = "the model's logits were not finite" if ended == UNSOUND else None
        sequence = self.member.sequence
        sequence.in_flight -= self.num_draft + 1
        taken = max(0, min(self.num_draft, sequence.max_len - len(sequence.tokens) - 1))  # as seen by the device
        length = len(sequence.tokens) + num_fresh
        sequence.target.advance(length - 1)
        if self.draft_caught_up:
            sequence.draft.advance(max(sequence.draft.kv_len, length - 2))
        return replace(
            self.work, num_verified=taken, num_accepted=num_accepted, tokens=tuple(drawn[:num_fresh]), problem=problem
        )


class Rounds:
    """The interface of rounds for a step. This base class has none: all sequences decode in plain steps."""

    name = "plain"

    def takes(self, sequence: Sequence) -> bool:
        """Whether a new sequence decodes in rounds."""
        return False

    def launch(self, works: Seq[Work]) -> None:
        """Launch a round of exactly these sequences."""
        assert not works, "a round is planned, but there are no rounds"

    def read(self) -> list[RoundResult]:
        """Results of all rounds but the one that was just launched."""
        return []

    def leave(self, sequence: Sequence) -> None:
        """Free the sequence's slot, if it has one."""

    def record(self, progress: Progress = no_progress, *, later: bool = False) -> None:
        """Record rounds of every size and K; with `later` only those that can replace the others."""

    def record_missing(self) -> bool:
        """While idle: record a missing round; return whether another is left."""
        return False


class DeviceTimer:
    """Timestamps of the device's clock, taken without blocking the host."""

    def __init__(self, device: torch.device, clock: Clock) -> None:
        self._is_cuda, self._clock = device.type == "cuda", clock
        self._marks = list[Any]()

    def mark(self) -> None:
        """Record a timestamp; on a GPU, when its stream reaches this point."""
        self._marks.append(torch.cuda.Event(enable_timing=True) if self._is_cuda else self._clock())
        if self._is_cuda:
            self._marks[-1].record()

    def seconds(self) -> list[float]:
        """Seconds between successive marks. The device must have passed all of them."""
        return [a.elapsed_time(b) / 1e3 if self._is_cuda else b - a for a, b in pairwise(self._marks)]


@dataclass(slots=True)
class PendingRound:
    """A launched round with unread results: their copy is queued behind it, and `read` waits for it."""

    k: int
    size: int  # places of the batch
    entries: list[RoundEntry]  # in the order of their places
    fed: list[int]  # tokens of the draft's catch-up pass before the round, per sequence
    timer: DeviceTimer  # marks: before drafting, before verification, after it
    result: Committed
    _rows: Tensor = field(init=False)  # [B, K + 4]: tokens drawn; how many are new, and accepted; whether it ended
    _event: torch.cuda.Event | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        made = self.result
        self._rows = torch.cat([made.drawn, torch.stack([made.num_fresh, made.num_accepted, made.ended], 1)], 1)
        if self._rows.is_cuda:
            pinned = torch.empty(self._rows.shape, dtype=torch.int64, pin_memory=True)
            self._rows, self._event = pinned.copy_(self._rows, non_blocking=True), torch.cuda.Event()
            self._event.record()

    def read(self) -> list[list[int]]:
        if self._event is not None:
            self._event.synchronize()
        return self._rows.tolist()

    def draft_passes(self, places: int) -> list[tuple[int, int]]:
        """Sequences and tokens of each pass of the draft model; the first of a round feeds two tokens."""
        passes = [(places, 2 * places if i == 0 else places) for i in range(self.k)]
        return [*passes, (len(self.fed), sum(self.fed))] if self.fed else passes

    def forwards(self) -> tuple[Forward, ...]:
        """All passes of the round, without idle places."""
        count = len(self.entries)
        drafting = [Forward("draft", *passed) for passed in self.draft_passes(count)]
        return *drafting, Forward("verify", count, count + sum(entry.num_draft for entry in self.entries))
