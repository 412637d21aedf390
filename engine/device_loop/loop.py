"""The host's side of rounds on the device: it assigns slots, launches rounds and reads results one round late.

The plan defines which sequences take part in the next round and with how many drafts, and the scheduler has reserved
their pages. `serves` decides which requests can run here; all others run in plain steps.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from pilotfish.engine.control.step_time import StepFeedback
from pilotfish.engine.device_loop.graph_cache import GraphCache, RoundShape, covering, in_order_of_worth
from pilotfish.engine.device_loop.graphs import Graphs
from pilotfish.engine.device_loop.layout import DeviceModel
from pilotfish.engine.device_loop.results import (
    DeviceSequence,
    DeviceTimer,
    PendingRound,
    Progress,
    RoundEntry,
    RoundResult,
    Rounds,
    no_progress,
)
from pilotfish.engine.device_loop.round import Round, RoundOps
from pilotfish.engine.device_loop.slots import IDLE, MOST_ENDS, DeviceSlots
from pilotfish.engine.kernels.paging import send
from pilotfish.engine.kv.batch import Feed
from pilotfish.engine.model.runner import ModelRunner
from pilotfish.engine.params import SamplingParams, Verification
from pilotfish.engine.sampling.distribution import is_truncated
from pilotfish.engine.stats import Clock
from pilotfish.engine.step import Work
from pilotfish.engine.types import Sequence


def serves(sampling: SamplingParams, ends: Seq[int]) -> bool:
    """Whether a request can run here: it uses only temperature and truncation, and has few end tokens."""
    served = "temperature", "top_p", "top_k", "min_p", "seed", "n", "max_tokens", "stop", "stop_token_ids", "ignore_eos"
    plain = SamplingParams(**{name: getattr(sampling, name) for name in served})
    return sampling == plain and len(ends) <= MOST_ENDS


class RoundLoop(Rounds):
    """Up to `num_slots` sequences of at most `longest` tokens.

    Args:
        drafts_for: names of the proposers that use the model `draft`.
        chunk: maximum number of tokens of one catch-up pass of the draft.
        recorder: how rounds are recorded; `graphs.Graphs` on CUDA. By default they run unrecorded.
    """

    name = "rounds"

    def __init__(
        self, target: DeviceModel, draft: DeviceModel | None, ops: RoundOps, *, num_slots: int, longest: int,
        most_drafts: int, vocab: int, drafts_for: frozenset[str] = frozenset(), chunk: int = 512,
        recorder: Graphs | None = None, clock: Clock = time.perf_counter,
    ) -> None:  # fmt: skip
        assert longest <= min(fed.positions for fed in (target, draft or target)), "a position beyond a model's limit"
        self._target, self._draft, self._ops = target, draft, ops
        self._most_drafts = most_drafts if draft is not None else 0
        self._drafts_for, self._chunk = drafts_for if draft is not None else frozenset[str](), chunk
        self._clock, self._num_slots = clock, num_slots
        width = -(-(longest + most_drafts + 1) // target.arena.page_size)
        # The last page of each arena is not in the pool and belongs to no sequence.
        spare = target.arena.num_pages, (draft or target).arena.num_pages
        self.state = DeviceSlots(num_slots, longest, width, spare, vocab, target.model.device)
        self._free = list(range(num_slots, IDLE, -1))
        self._drafter = None if draft is None else ModelRunner(draft.model, draft.arena, ops.attend)
        self.graphs = GraphCache(self.round_of, recorder, covering(num_slots, self._most_drafts), clock=clock)
        self.on_device: dict[Sequence, DeviceSequence] = {}  # in order of arrival
        self._slots = dict[int, Tensor]()  # by batch size: the slot at each place; empty after a change
        self._pending: deque[PendingRound] = deque()  # launched but not read: one between steps, two within a step
        self._has_launched = False

    def takes(self, sequence: Sequence) -> bool:
        asked = sequence.speculation
        drafts_here = not asked.num_draft_tokens or asked.proposer in self._drafts_for
        has_one_table = sequence.target.border is None and sequence.draft.border is None
        ends = tuple(sequence.end_token_ids)
        is_predicted = sequence.alignment is not None and sequence.most_predicted > 0
        return drafts_here and has_one_table and not is_predicted and serves(sequence.request.sampling, ends)

    def try_out(self) -> None:
        """Run rounds without sequences, so that a model that cannot run in rounds fails here and not in a request."""
        nobody = torch.full((1,), IDLE, dtype=torch.int64, device=self.state.tracks.length.device)
        for truncated in (False, True):
            for k in (0, min(1, self._most_drafts)):
                self.graphs.try_out(RoundShape(1, k, truncated))(nobody, lambda: None)

    def record(self, progress: Progress = no_progress, *, later: bool = False) -> None:
        """Record rounds of every shape that can occur, within the memory budget.

        With `later` record only those that can replace all others; the rest is left to `record_missing`.
        """
        self.graphs.record(self.shapes, progress, self._most_drafts + 1 if later else None)

    @property
    def shapes(self) -> list[RoundShape]:
        """The shapes of all possible rounds, by priority."""
        return in_order_of_worth(self._num_slots, self._most_drafts)

    def record_missing(self) -> bool:
        return self.graphs.record_missing()

    # ------------------------------------------------------------------------------------------------- launching

    def launch(self, works: Seq[Work]) -> None:
        """Launch a round of exactly these. The scheduler has reserved pages for all writes of rounds in flight."""
        wanted = {work.sequence: work for work in works}
        for sequence in [s for s in self.on_device if s not in wanted]:
            self.leave(sequence)
        for sequence in wanted:
            if sequence not in self.on_device:
                self._enter(sequence)
        # A round in flight certainly ends a sequence with one token left: every round yields at least one.
        self._has_launched = not all(s.in_flight > 0 and len(s.tokens) + 1 >= s.max_len for s in self.on_device)
        if self._has_launched:
            self._launch(wanted)

    def _enter(self, sequence: Sequence) -> None:
        slot, sampling = self._free.pop(), sequence.request.sampling
        ends = tuple(sequence.end_token_ids)
        rejects = sequence.speculation.verification is Verification.REJECTION
        self.state.place(slot, sequence.tokens, sequence.max_len, ends, sampling, sequence.seed, rejects=rejects)
        self.on_device[sequence] = DeviceSequence(sequence, slot)
        self._slots.clear()

    def leave(self, sequence: Sequence) -> None:
        """Free the sequence's slot, if any. Results of rounds in flight are then ignored."""
        member = self.on_device.pop(sequence, None)
        if member is not None:
            self._free.append(member.slot)  # later rounds do not read the slot until it is filled again
            self._slots.clear()
            sequence.in_flight = 0

    def _launch(self, wanted: dict[Sequence, Work]) -> None:
        timer = DeviceTimer(self.state.tracks.length.device, self._clock)
        timer.mark()
        fed = self._catch_up(wanted)
        given = {s: work.num_draft if self.on_device[s].draft_caught_up else 0 for s, work in wanted.items()}
        k = max(given.values())
        for member in self.on_device.values():
            self._prepare(member, given[member.sequence], k)
        self.state.send()
        truncated = any(is_truncated(s.request.sampling) for s in wanted)
        rejects = any(s.speculation.verification is Verification.REJECTION for s in wanted)
        size, run = self.graphs.of(len(self.on_device), k, truncated=truncated, rejects=rejects)
        result = run(self._laid_out(size), timer.mark)
        timer.mark()
        entries = [RoundEntry(r, wanted[s], given[s], r.draft_caught_up) for s, r in self.on_device.items()]
        self._pending.append(PendingRound(k, size, entries, fed, timer, result))
        for sequence, num_draft in given.items():
            sequence.in_flight += num_draft + 1

    def _catch_up(self, wanted: dict[Sequence, Work]) -> list[int]:
        """Feed the draft the missing tokens of the sequences that get drafts; return their number per sequence.

        If the draft is behind, the round in flight adds exactly one token, so the draft must read `tokens[:-1]`. A
        sequence that does not catch up within a chunk gets no drafts yet.
        """
        feeds, room = list[Feed](), self._chunk
        for sequence, member in self.on_device.items():
            if not wanted[sequence].num_draft or member.draft_caught_up:
                continue
            cursor, stop = sequence.draft, len(sequence.tokens) - 1
            chunk = sequence.tokens[cursor.kv_len : min(stop, cursor.kv_len + room)]
            if chunk:
                feeds.append(Feed(chunk, cursor.kv_len, cursor.page_table, num_logits=0))
                cursor.advance(feeds[-1].kv_len)
            room -= len(chunk)
            member.draft_caught_up = cursor.kv_len == stop
        if feeds:
            assert self._drafter is not None, "drafts without a draft model"
            self._drafter.forward(feeds)
        return [len(feed.tokens) for feed in feeds]

    def _prepare(self, member: DeviceSequence, num_draft: int, k: int) -> None:
        """Write changes of the sequence's pages and K to its slot."""
        sequence = member.sequence
        self.state.target.enter(member.slot, sequence.target.page_table)
        self.state.draft.enter(member.slot, sequence.draft.page_table)
        if min(member.num_draft, k) != num_draft:
            member.num_draft = self._most_drafts if num_draft == k else num_draft
            self.state.set_num_draft(member.slot, member.num_draft)
        if member.draft_caught_up and not num_draft:  # no drafts in this round, or no pages for them
            member.draft_caught_up = False
            sequence.draft.kv_len = max(0, min(sequence.draft.kv_len, len(sequence.tokens) - 2))

    def _laid_out(self, size: int) -> Tensor:
        """The slot at each of `size` places; uploaded only when a sequence was added or removed."""
        if size not in self._slots:
            slots = [member.slot for member in self.on_device.values()] + [IDLE] * (size - len(self.on_device))
            self._slots[size] = send(torch.tensor(slots, dtype=torch.int64), self.state.tracks.length.device)
        return self._slots[size]

    def round_of(self, shape: RoundShape, rejects: bool = False) -> Round:
        draft = self._draft if shape.k else None
        size, k, truncated = shape
        return Round(self.state, self._target, draft, self._ops, size, k, truncated=truncated, rejects=rejects)

    # --------------------------------------------------------------------------------------------------- reading

    def read(self) -> list[RoundResult]:
        """Results of all rounds except the one just launched. The cursors already include their tokens."""
        round_results = []
        while len(self._pending) > self._has_launched:
            round_results.append(self._land(self._pending.popleft()))
        self._has_launched = False
        return round_results

    def _land(self, pending: PendingRound) -> RoundResult:
        rows = pending.read()
        pairs = zip(pending.entries, rows, strict=False)
        works = tuple(x.settle(row) for x, row in pairs if self.on_device.get(x.member.sequence) is x.member)
        drafting, other = pending.timer.seconds()
        feedback = StepFeedback(
            sequences=[work.sequence for work in works],
            lengths=[work.length for work in works],
            asked=[work.num_draft for work in works],
            drafted=[work.num_verified for work in works],
            accepted=[work.num_accepted for work in works],
            draft_passes=pending.draft_passes(pending.size),
            draft_seconds=drafting,
            other_seconds=other,
            rows=pending.size * (pending.k + 1),
        )
        return RoundResult(works, feedback, pending.forwards())
