"""The host's side of rounds on the device: who stands where, one launch after the other, answers one round late.

Knows no scheduling policy: whoever calls `add`, `remove` and `step` decides who runs and how many drafts are made. It
takes what `serves` says it takes; everything else is for the plain loop.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from engine.batch import Feed
from engine.kernels.args import FULL, STOPPED, UNSOUND
from engine.pages import BlockPool
from engine.resident import IDLE, MOST_ENDS, Place, Resident
from engine.rounds import Brought, Fed, Ops, Round
from engine.runner import ModelRunner
from engine.sampling import Kind
from engine.types import FinishReason, KVCursor, SamplingParams, Verification

_REASONS = {STOPPED: FinishReason.STOP, FULL: FinishReason.LENGTH, UNSOUND: FinishReason.ERROR}
_SIZES = (
    1,
    2,
    4,
    8,
    16,
    24,
    32,
    48,
    64,
    96,
    128,
)  # places of a batch; each with each K, with cuts or not, is one graph
Run = Callable[[Tensor], Brought]


@dataclass(slots=True)
class Live:
    """A sequence in the loop, as the host knows it: up to the round before the last one launched."""

    place: Place
    tokens: list[int]
    slot: int = IDLE
    cursor: KVCursor = field(default_factory=KVCursor)
    draft_len: int | None = None  # tokens that the draft has certainly been fed; None: all but the last two

    @property
    def is_cut(self) -> bool:
        """Whether its law has a top-k, top-p or min-p."""
        return Kind.of(self.place.sampling) is Kind.CUT


@dataclass(frozen=True, slots=True)
class News:
    """What a round brought one sequence."""

    name: str
    tokens: tuple[int, ...]
    num_accepted: int
    finished: FinishReason | None


def serves(sampling: SamplingParams, verification: Verification, ends: Seq[int]) -> bool:
    """Whether a request can run here: coupled, shaped by temperature and cuts alone, with few end tokens."""
    plain = SamplingParams(
        temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k, min_p=sampling.min_p,
        seed=sampling.seed, n=sampling.n, max_tokens=sampling.max_tokens, stop=sampling.stop,
        stop_token_ids=sampling.stop_token_ids, ignore_eos=sampling.ignore_eos,
    )  # fmt: skip
    return sampling == plain and verification is Verification.COUPLED and len(ends) <= MOST_ENDS


class RoundLoop:
    """Up to `num_slots` sequences of at most `longest` tokens. Arenas have one page more than the pool: nobody's.

    Args:
        make_run: how a round is run; `captured` on CUDA, by default as it is.
    """

    def __init__(
        self,
        target: Fed,
        draft: Fed | None,
        ops: Ops,
        *,
        num_slots: int,
        longest: int,
        most_drafts: int,
        vocab: int,
        chunk: int = 512,
        make_run: Callable[[Round, int], Run] = lambda run, _size: run,
    ) -> None:
        arena = target.arena
        assert longest <= min(fed.positions for fed in (target, draft or target)), "a position that no model knows"
        assert draft is None or (draft.arena.num_pages, draft.arena.page_size) == (arena.num_pages, arena.page_size)
        self._target, self._draft, self._ops, self._most_drafts = target, draft, ops, most_drafts
        self._chunk, self._make_run = chunk, make_run
        self._pool = BlockPool(arena.num_pages - 1, arena.page_size)
        width = -(-(longest + most_drafts + 1) // arena.page_size)
        self.state = Resident(num_slots, longest, width, arena.num_pages - 1, vocab, target.model.device)
        self._free = list(range(num_slots, IDLE, -1))
        self._runners = [ModelRunner(fed.model, fed.arena, ops.attend) for fed in (target, draft) if fed is not None]
        self._runs: dict[tuple[int, int, bool], Run] = {}
        self.live: dict[str, Live] = {}  # in the order of their admission
        self._shelved: dict[str, Live] = {}  # preempted: without slot and pages
        self.num_preempted = 0
        self._places: list[str] | None = None  # who stands at which place of the batch; None: to be laid out anew
        self._slots = torch.empty(0, dtype=torch.int64)
        self._pending: _Mail | None = None

    @property
    def has_work(self) -> bool:
        """Whether anybody is in the loop."""
        return bool(self.live or self._shelved)

    @property
    def num_free_pages(self) -> int:
        """Pages that nobody holds."""
        return self._pool.num_free

    def add(self, name: str, place: Place) -> bool:
        """Prefill and place a sequence; False, and nothing changed, where there is no slot or there are too few pages.

        The pool must be able to hold it at its longest: then whatever is preempted for want of pages comes back.
        """
        most = self._pool.pages_for(place.max_length + self._most_drafts + 1)
        if self._shelved or most > self._pool.num_pages:
            return False
        return self._admit(name, Live(place, list(place.tokens)))

    def remove(self, name: str) -> None:
        """Take a sequence out, whatever a round in flight may still say of it."""
        if name in self._shelved:
            del self._shelved[name]
        else:
            self._vacate(name)

    def set_num_draft(self, name: str, num_draft: int) -> None:
        """How many drafts of each round's K this sequence takes from now on."""
        live = self.live.get(name) or self._shelved[name]
        live.place = replace(live.place, num_draft=num_draft)
        if live.slot != IDLE:
            self.state.set_num_draft(live.slot, num_draft)

    def _admit(self, name: str, live: Live) -> bool:
        if not self._free or not self._pool.reserve(live.cursor, self._reach(live, self._most_drafts)):
            return False
        for runner in self._runners:
            self._feed(runner, live.tokens, 0, live.cursor.page_table)
        live.slot, live.draft_len = self._free.pop(), None
        self.state.place(live.slot, replace(live.place, tokens=live.tokens), live.cursor.page_table)
        self.live[name], self._places = live, None
        return True

    def _vacate(self, name: str) -> Live:
        live = self.live.pop(name)
        self.state.free(live.slot)
        self._pool.release(live.cursor)
        self._free.append(live.slot)
        live.slot, self._places = IDLE, None
        return live

    def _reach(self, live: Live, k: int) -> int:
        """Positions that a round of `k` drafts may write of a sequence, whatever the round in flight brings."""
        longer = 0 if self._pending is None else self._pending.k + 1
        return min(live.place.max_length, len(live.tokens) + longer) + k + 1

    def _grow(self, k: int) -> list[News]:
        """Pages for a round of `k`, oldest first; where they run out the newest make room, and come back later."""
        news: list[News] = []
        for name in list(self.live):
            while (live := self.live.get(name)) is not None:
                held = len(live.cursor.page_table)
                if self._pool.reserve(live.cursor, self._reach(live, k)):
                    self.state.grow(live.slot, held, live.cursor.page_table[held:])
                    break
                if self._pending is not None:
                    news += self.drain()  # somebody may have ended, and nobody reaches as far as was feared
                else:
                    newest = next(reversed(self.live))
                    self._shelved = {newest: self._vacate(newest), **self._shelved}
                    self.num_preempted += 1
        return news

    def step(self, k: int) -> list[News]:
        """Launch a round of `k` drafts, if anybody is there, and then read what the one before it brought."""
        assert k <= self._most_drafts, "tables have no room for so many"
        while self._shelved and self._admit(name := next(iter(self._shelved)), self._shelved[name]):
            del self._shelved[name]
        news = self._grow(k)
        if k and any(live.draft_len is not None for live in self.live.values()):
            news += self._catch_up()
        mail = self._launch(k) if self.live else None
        news += self._read()
        self._pending = mail
        return news

    def drain(self) -> list[News]:
        """Read what is still in flight, so that the host knows all that the device does."""
        news = self._read()
        self._pending = None
        return news

    def _launch(self, k: int) -> _Mail:
        names, slots = self._laid_out()
        if not k:
            for live in self.live.values():
                if live.draft_len is None:
                    live.draft_len = max(0, len(live.tokens) - 2)
        size, cuts = len(slots), any(live.is_cut for live in self.live.values())
        key = size, k, cuts
        if key not in self._runs:
            round_ = Round(self.state, self._target, self._draft if k else None, self._ops, size, k, cuts=cuts)
            self._runs[key] = self._make_run(round_, size)
        return _Mail(k, [(name, self.live[name], self.live[name].slot) for name in names], self._runs[key](slots))

    def _laid_out(self) -> tuple[list[str], Tensor]:
        """Who stands where; uploaded only when somebody came or went."""
        if self._places is None:
            self._places = list(self.live)
            size = next((size for size in _SIZES if size >= len(self._places)), len(self._places))
            slots = [self.live[name].slot for name in self._places]
            slots += [IDLE] * (size - len(slots))
            self._slots = torch.tensor(slots, dtype=torch.int64).to(self._target.model.device)
        return self._places, self._slots

    def _read(self) -> list[News]:
        if self._pending is None:
            return []
        news = []
        for name, owner, slot, (*drawn, num_fresh, num_accepted, ended) in self._pending.read():
            live = self.live.get(name)
            if live is None or live is not owner or live.slot != slot or not (num_fresh or ended):
                continue  # it was taken out meanwhile, or had ended before
            fresh = tuple(drawn[:num_fresh])
            live.tokens += fresh
            news.append(News(name, fresh, num_accepted, _REASONS.get(ended)))
            if ended:
                self.remove(name)
        return news

    def _catch_up(self) -> list[News]:
        """Feed the draft what it missed while nobody drafted; the host has to know the lengths for that."""
        news = self.drain()
        for live in self.live.values():
            if live.draft_len is not None:
                self._feed(self._runners[-1], live.tokens, live.draft_len, live.cursor.page_table)
                live.draft_len = None
        return news

    def _feed(self, runner: ModelRunner, tokens: Seq[int], start: int, pages: Seq[int]) -> None:
        """Everything from `start` on but the newest token, which is what the next round feeds."""
        for first in range(start, len(tokens) - 1, self._chunk):
            chunk = tokens[first : min(first + self._chunk, len(tokens) - 1)]
            runner.forward([Feed(chunk, first, pages, num_logits=0)])


class _Mail:
    """What a round brought, on its way to the host: copied behind the round, waited for when it is read."""

    def __init__(self, k: int, owners: list[tuple[str, Live, int]], brought: Brought) -> None:
        self.k, self._owners, made = k, owners, brought.committed
        packed = torch.cat([brought.drawn, torch.stack([made.num_fresh, made.num_accepted, made.ended], 1)], 1)
        self._event = torch.cuda.Event() if packed.is_cuda else None
        if self._event is None:
            self._rows = packed
        else:
            self._rows = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            self._rows.copy_(packed, non_blocking=True)
            self._event.record()

    def read(self) -> list[tuple[str, Live, int, list[int]]]:
        """Of each sequence: its drawn tokens, then how many are fresh, how many of them drafts, whether it ended."""
        if self._event is not None:
            self._event.synchronize()
        return [(*owner, row) for owner, row in zip(self._owners, self._rows.tolist(), strict=False)]


def captured(run: Round, size: int) -> Run:
    """The round as a CUDA graph, to be replayed; captured on idle places, which nothing notices."""
    slots = torch.full((size,), IDLE, dtype=torch.int64, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):  # compiles kernels and lets libraries choose theirs: neither may happen in a capture
            run(slots)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        brought = run(slots)

    def replay(now: Tensor) -> Brought:
        slots.copy_(now)
        graph.replay()
        return brought

    return replay
