"""Recorded rounds: what a capture asks of CUDA, and that mistakes which only a graph makes are found on the card."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

from pilotfish.engine.device_loop import graphs, layout, slots
from pilotfish.engine.device_loop.graph_cache import RoundShape
from pilotfish.engine.device_loop.graphs import Graphs, MemoryBudget, MemoryUse, RecordedRound
from pilotfish.engine.device_loop.layout import Layout
from pilotfish.engine.device_loop.results import PendingRound
from pilotfish.engine.device_loop.round import Round
from pilotfish.engine.device_loop.slots import DeviceSlots, Tables
from pilotfish.engine.engine import Engine
from pilotfish.engine.kernels.paging import Paging, send
from tests import fakes
from tests.card import Card, here
from tests.loops import engine_of, loop_of, on_the_card, plainly, recorded, request

Patch = pytest.MonkeyPatch


@pytest.mark.parametrize("k", [0, 2])
def test_a_round_is_warmed_up_captured_and_played(k: int, card: Card) -> None:
    taken = iter([MemoryUse(100, 100), MemoryUse(140, 140)])
    loop = loop_of(on_the_card())
    record = Graphs(MemoryBudget(30, lambda: next(taken)))
    assert record.has_room
    play = record(loop.round_of(RoundShape(2, k, True)))
    drafting = ["capture", "captured"] if k else []
    played = ["play", "play"] if k else ["play"]
    assert card.told == ["wait", "on its stream", "wait", *drafting, "capture", "captured", *played]
    assert gc.isenabled()
    assert not record.has_room
    timer = []
    play(torch.zeros(2, dtype=torch.int64, device="cuda"), lambda: timer.append(len(card.told)))
    assert timer == [len(card.told) - 1], "the mark is between drafting and verification"


def test_a_capture_that_fails_leaves_collection_on(card: Card, monkeypatch: Patch) -> None:
    loop = loop_of(on_the_card())
    round_ = loop.round_of(RoundShape(2, 1, True))
    monkeypatch.setattr(Graphs, "_warm_up", lambda *_: None)
    monkeypatch.setattr(Round, "propose", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Graphs(MemoryBudget(30, lambda: MemoryUse(0, 0)))(round_)
    assert gc.isenabled()
    assert card.capture is None


# ------------------------------------------------------------------------------------- mistakes that only a graph makes


def forget_the_round(patch: Patch) -> None:
    """Its constants were made before the capture, and die with it."""
    patch.setattr(graphs, "RecordedRound", lambda _, *rest: RecordedRound(None, *rest))


def play_for_other_slots(patch: Patch) -> None:
    """The slots are given anew each time, and not written where the graph reads them."""
    patch.setattr(RecordedRound, "__call__", lambda self, slots, between: replay(replace(self, slots=slots), between))


def replay(play: RecordedRound, between: Callable[[], None]) -> object:
    if play.drafting is not None:
        play.drafting.replay()
    between()
    play.verifying.replay()
    return play.output


def freeze_the_temperature(patch: Patch) -> None:
    """It is a number of the host's, that of the newest sequence: as good as any for a round of one that is run."""
    place, samplers, newest = DeviceSlots.place, Layout._samplers, [0.0]

    def noting(self, slot, tokens, max_length, ends, sampling, *others, **more):
        newest[0] = sampling.temperature
        place(self, slot, tokens, max_length, ends, sampling, *others, **more)

    def frozen(self, *args):
        found = samplers(self, *args)
        return replace(found, temperature=torch.full_like(found.temperature, newest[0]))

    patch.setattr(DeviceSlots, "place", noting)
    patch.setattr(Layout, "_samplers", frozen)


def freeze_a_length(patch: Patch) -> None:
    """It is the number of pages that the longest sequence has when a round is made."""
    enter, most = Tables.enter, [1]

    def noting(self, slot, pages):
        most[0] = max(most[0], len(pages))
        enter(self, slot, pages)

    def frozen(tiles, spans, pages, page_size, max_kv):
        return Paging(tiles, spans, pages, page_size, min(max_kv, most[0] * page_size))

    patch.setattr(Tables, "enter", noting)
    patch.setattr(layout, "Paging", frozen)


def move_what_has_grown(patch: Patch) -> None:
    """The tables get new memory with each new page, as a list might."""

    def moving(self, slot, pages):
        self.pages = self.pages.clone()
        self.pages[slot, : len(pages)].copy_(send(torch.tensor(pages, dtype=torch.int32), self.pages.device))

    patch.setattr(Tables, "enter", moving)


def read_after_the_next_play(patch: Patch) -> None:
    """The output is not copied behind its own round, but when somebody wants it."""
    patch.setattr(PendingRound, "__post_init__", lambda _: None)

    def late(self):
        made = self.result
        ends = torch.stack([made.num_fresh, made.num_accepted, made.ended], 1)
        return torch.cat([made.drawn, ends], 1).tolist()

    patch.setattr(PendingRound, "read", late)


def mark_before_the_copy(patch: Patch) -> None:
    """The event that is waited for lies before what it is to tell of."""
    begin = PendingRound.__post_init__

    def early(self):
        mark = torch.cuda.Event() if self.result.drawn.is_cuda else None
        if mark:
            mark.record()
        begin(self)
        self._event = mark

    patch.setattr(PendingRound, "__post_init__", early)


def write_what_is_being_sent(patch: Patch) -> None:
    """Pinned memory is allocated once, and written while the copy before is on its way."""
    held = []

    def sent(numbers, device):
        if device.type != "cuda":
            return numbers.to(device)
        if not held:
            held.append(torch.zeros(4096, dtype=numbers.dtype, pin_memory=True))
        held[0][: len(numbers)].copy_(numbers)
        return held[0].to(device, non_blocking=True)[: len(numbers)]

    patch.setattr(slots, "send", sent)


def decide_on_the_host(patch: Patch) -> None:
    propose = Round.propose
    patch.setattr(Round, "propose", lambda self, slots: propose(self, slots if slots.any().item() else slots.clone()))


SOON = forget_the_round, read_after_the_next_play, decide_on_the_host
LATER = (
    play_for_other_slots, freeze_the_temperature, freeze_a_length, move_what_has_grown, mark_before_the_copy,
    write_what_is_being_sent,
)  # fmt: skip


def problem(make: Callable[..., Engine]) -> str:
    """What goes wrong with requests that come one after the other, in rounds of one place; or nothing."""
    want = {asked: plainly(asked)[0] for asked in (request(i, max_tokens=20) for i in (1, 2))}
    try:
        engine = make(num_draft_tokens=1)
        got = {asked: fakes.run(engine, [asked]).tokens[asked.request_id] for asked in want}
    except Exception as error:  # noqa: BLE001 - a number that is poison may lead anywhere
        return repr(error)
    return "" if (got, engine.rounds.name) == (want, "rounds") else f"other tokens, {engine.rounds.name}"


def test_without_a_mistake_the_tokens_are_those_of_plain_decoding(card: Card) -> None:
    assert problem(partial(recorded, shapes=())) == ""
    assert card.told.count("play") > 40


@pytest.mark.parametrize("plant", [*SOON, *(pytest.param(plant, marks=pytest.mark.slow) for plant in LATER)])
def test_a_mistake_is_found_on_the_card_alone(plant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    """In rounds that no graph plays, on a CPU, it changes no token."""
    with monkeypatch.context() as patch:
        plant(patch)
        assert problem(engine_of) == ""
    plant(monkeypatch)
    with here():
        assert problem(partial(recorded, shapes=()))
