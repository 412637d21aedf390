"""Rounds on the device: the tokens of the plain loop, and no look at the device while they are made."""

from __future__ import annotations

import logging
import random
from collections.abc import Collection
from dataclasses import replace
from functools import partial

import pytest
import torch

from pilotfish.engine.device_loop import slots
from pilotfish.engine.device_loop.graph_cache import RoundShape, covering
from pilotfish.engine.device_loop.graphs import RecordedRound
from pilotfish.engine.device_loop.round import Round, RoundOps
from pilotfish.engine.device_loop.slots import REJECTS
from pilotfish.engine.engine import Engine
from pilotfish.engine.errors import ModelError
from pilotfish.engine.kernels.paging import send
from pilotfish.engine.kv.batch import Feed
from pilotfish.engine.model.runner import ModelRunner
from pilotfish.engine.params import SamplingParams, SpeculationMode, Verification
from pilotfish.engine.startup.device_loop import ops_on
from pilotfish.engine.step import Work
from pilotfish.engine.types import FinishReason, KVCursor, Request
from tests import fakes, zoo
from tests.card import Card, here
from tests.interpreting import WHY_NOT
from tests.loops import (
    LONGEST,
    PLAIN,
    AnyK,
    Scripted,
    asking,
    engine_of,
    loop_of,
    models,
    no_wait,
    on_the_card,
    plainly,
    recorded,
    request,
    steered,
    steps_without_waiting,
)

READS = {"verification.py:_read"}  # what the host waits for: what a plain step has decided


def check(said: fakes.Outputs, asked: list[Request], family: str = "llama", cut: Collection[str] = ()) -> None:
    """Requests have the tokens of plain decoding, or the first of them where they were cut."""
    for one in asked:
        tokens, reason = plainly(one, family)
        got = said.tokens.get(one.request_id, [])
        if one.request_id in cut:
            assert got == tokens[: len(got)]
        else:
            assert (got, said.finished[one.request_id].reason) == (tokens, reason)


def run_and_check(engine: Engine, asked: list[Request], family: str = "llama") -> None:
    check(fakes.run(engine, asked), asked, family)


def mixed(i: int) -> Request:
    """Some can ride, some cannot, and some ask for other drafts or none."""
    kind, most = i % 7, 4 + i % 12
    if kind == 4:
        return asking(request(i, max_tokens=most, logprobs=1))
    if kind == 5:
        return asking(request(i, max_tokens=most, repetition_penalty=1.3), proposer="ngram")
    wishes = ({}, {"proposer": "model"}, {"num_draft_tokens": 2}, {"mode": SpeculationMode.OFF}, {}, {}, {})[kind]
    auto = {"mode": SpeculationMode.AUTO} if kind == 6 else {}
    return asking(request(i, max_tokens=most), **wishes, **auto)


@pytest.mark.parametrize(("seed", "pages", "page_size"), [(1, 17, 4), pytest.param(0, 5, 16, marks=pytest.mark.slow)])
def test_the_tokens_of_the_plain_loop(seed: int, pages: int, page_size: int, card: Card) -> None:
    """Random admissions, ends, Ks and companies, chunks of prompts, few pages and many."""
    rng = random.Random(seed)
    engine, said, cut = steered(AnyK(seed), recorded, pages=pages, page_size=page_size), fakes.Outputs(), set()
    waiting = [mixed(100 * seed + i) for i in range(14)]
    asked = list(waiting)
    while waiting or engine.has_work:
        if waiting and rng.random() < 0.5:
            engine.add(waiting.pop(0))
        if engine.has_work and rng.random() < 0.06:
            name = rng.choice(sorted(engine._live))
            cut.add(name)
            said.take(engine.finish(name, FinishReason.ABORTED))
        said.take(engine.step().events)
        engine.check_invariants()
    check(said, asked, cut=cut)
    assert engine.rounds.name == "rounds"
    assert not engine.rounds.on_device
    assert not engine.rounds.graphs.unrecorded


def test_some_ride_and_some_do_not() -> None:
    engine = engine_of()
    others = ({"logit_bias": {3: 1.0}}, {"min_tokens": 2, "max_tokens": 9}, {"stop_token_ids": tuple(range(9))})
    for one in (*map(mixed, range(7)), *(request(7 + i, **other) for i, other in enumerate(others))):
        engine.add(one)
    on_device = {s.request_id: s.on_device for s in engine.scheduler.sequences}
    assert on_device == {str(i): i not in (4, 5, 7, 8, 9) for i in range(10)}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "gemma2", "gpt-oss", "deepseek-v3"])
def test_other_families(family: str, card: Card) -> None:
    """Learned positions; windows and softcaps; sinks and experts; latents."""
    run_and_check(recorded(family), [request(i, max_tokens=12) for i in (1, 2, 3)], family)


@pytest.mark.parametrize("ks", [[4, 4, 0, 0, 4], pytest.param([2, 0, 1, 0, 0, 3], marks=pytest.mark.slow)])
def test_drafts_are_kept(ks: list[int], card: Card) -> None:
    """A draft that is the target is right each time, from the first round on, and after rounds without drafts."""
    target = on_the_card()[0]
    shapes = [RoundShape(1, k, True) for k in {*ks, 0}]
    engine = steered(Scripted([*ks, *[0] * 30]), recorded, pair=(target, target), shapes=shapes)
    engine.add(request(1, max_tokens=30))
    brought = [event for _ in range(len(ks) + 3) for event in engine.step().events]
    # The prompt's pass brings the first token; its round is launched with the next step and read with the one after.
    assert [sum(event.from_draft) for event in brought][: len(ks) + 1] == [0, *ks]
    assert [len(event.token_ids) for event in brought][: len(ks) + 1] == [1, *(k + 1 for k in ks)]


def test_a_prompt_is_fed_between_rounds(card: Card) -> None:
    """One decodes while another's long prompt comes in chunks: each step brings the first one a round."""
    first = request(2, max_tokens=30)
    long = fakes.request(range(3, 53), name="long", max_tokens=5)
    engine = recorded(max_batch_tokens=8, draft=None, proposer="none", shapes=[RoundShape(2, 0, True)])
    engine.add(first)
    while not engine.rounds.on_device:
        engine.step()
    engine.step()
    engine.add(long)
    for _ in range(6):
        step = engine.step()
        assert [event.request_id for event in step.events] == [first.request_id]
        assert step.stats.prompt_tokens == 8


def test_a_prefix_is_found_and_shared_by_device_sequences(card: Card) -> None:
    """A second request with the prompt and output of a first finds its pages, the draft's too."""
    engine = recorded(page_size=4, proposer="model", num_draft_tokens=1, shapes=())
    first = fakes.request(range(5, 25), name="a", max_tokens=20, seed=1)
    tokens = fakes.run(engine, [first]).tokens["a"]
    again = fakes.request((*first.token_ids, *tokens[:-3]), name="b", max_tokens=20, seed=1)
    engine.add(again)
    engine.step()
    (sequence,) = engine.scheduler.sequences
    assert sequence.num_cached == (len(again.token_ids) - 1) // 4 * 4
    engine.step()
    assert sequence.draft.shared, "the draft was fed what another sequence had fed it"
    engine.finish("b", FinishReason.ABORTED)
    assert fakes.run(engine, [again]).tokens["b"] == plainly(again)[0]


def test_rounds_that_fail_are_given_up(
    card: Card, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = recorded(num_draft_tokens=2, shapes=[RoundShape(8, 2, True)])
    asked = [request(i, max_tokens=12) for i in range(5)]
    said = fakes.Outputs()
    for one in asked:
        engine.add(one)
    for _ in range(4):
        said.take(engine.step().events)
    monkeypatch.setattr(RecordedRound, "__call__", lambda *_: 1 / 0)
    while engine.has_work:
        said.take(engine.step().events)
        engine.check_invariants()
    assert engine.rounds.name == "plain"
    assert "a round on the device failed" in caplog.text
    check(said, asked)


def test_no_number_ends_one_request(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that is no number ends the sequence whose it is, and nobody else's."""
    engine = recorded(num_draft_tokens=2, shapes=[RoundShape(4, 2, True)])
    asked, play, said = [request(i, max_tokens=16) for i in (1, 2, 5)], RecordedRound.__call__, fakes.Outputs()
    for one in asked:
        engine.add(one)
    while len(engine.rounds.on_device) < 3:
        said.take(engine.step().events)
    (victim, *_) = engine.rounds.on_device.values()

    def broken(self, slots, between):
        state = engine.rounds.state
        brought = play(self, slots, between)
        mine = slots == victim.slot
        state.tracks.running[slots] = state.tracks.running[slots] * ~mine
        ended = torch.where(mine, 3, brought.ended)
        fresh = torch.where(mine, 0, brought.num_fresh)
        return replace(brought, ended=ended, num_fresh=fresh)

    with monkeypatch.context() as patch:
        patch.setattr(RecordedRound, "__call__", broken)
        said.take(engine.step().events)
    while engine.has_work:
        said.take(engine.step().events)
    ended = said.finished.pop(victim.sequence.request_id)
    assert (ended.reason, ended.error) == (FinishReason.ERROR, "the model's logits were not finite")
    check(said, [one for one in asked if one.request_id in said.finished])


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"reproducible": True, "attention": "auto"}, "reproducible is set"),
        ({"family": "phi3-longrope"}, "two rotary tables"),
    ],
)
def test_asked_for_in_vain(options, why) -> None:
    with pytest.raises(ModelError, match=why):
        engine_of(**options)


def test_the_loop_of_a_cpu_is_plain(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert engine_of(loop="auto").rounds.name == "plain"
    assert "loop: plain (the default on a CPU)" in caplog.text


def round_of(
    pair, ops: RoundOps, k: int, *, truncated: bool = True, rejects: bool = False
) -> tuple[Round, torch.Tensor]:
    """A round of three sequences that were fed but for their newest tokens, and an idle place."""
    loop = loop_of(pair, ops)
    works = []
    for i in range(3):
        asked, pages = request(i), range(10 * i, 10 * i + 4)
        settings = {"mode": SpeculationMode.FIXED, "max_len": LONGEST, "seed": 2**64 - 1 - i}
        sequence = fakes.sequence(asked.token_ids, name=asked.request_id, sampling=asked.sampling, **settings)
        sequence.target, sequence.draft = (KVCursor(list(pages), len(sequence.tokens) - 1) for _ in range(2))
        for runner in (loop._drafter, ModelRunner(pair[0], loop._target.arena, ops.attend)):
            if tokens := sequence.tokens[:-1]:
                runner.forward([Feed(tokens, 0, sequence.target.page_table, num_logits=0)])
        works.append(Work.feeding(sequence, 1))
    loop.launch(works)
    loop.read()
    slots = loop._laid_out(4)
    return loop.round_of(RoundShape(4, k, truncated), rejects), slots


@pytest.mark.parametrize(
    ("family", "k", "rejects"),
    [("llama", 0, False), ("llama", 3, False), ("llama", 3, True), ("gpt2", 1, False), ("gpt-oss", 2, False)],
)
def test_a_round_without_the_host(family: str, k: int, rejects: bool, card: Card) -> None:
    """In plain torch too; sorting places by expert reads nothing either: transformers' own code would."""
    run, slots = round_of(on_the_card(family), PLAIN, k, rejects=rejects)
    if rejects:
        run._state.whole[REJECTS, slots[:2]] = 1
    uploads = card.uploads
    with no_wait():
        brought = run.verify(slots, run.propose(slots))
    assert card.uploads == uploads
    num_fresh = brought.num_fresh.tolist()
    assert min(num_fresh[:3]) > 0 == num_fresh[3]


@pytest.mark.parametrize("ks", [[4], *(pytest.param(ks, marks=pytest.mark.slow) for ks in ([0], [4, 2, 3]))])
def test_the_steady_loop_does_not_wait(ks: list[int], card: Card) -> None:
    """As `tests/cuda` has it on a GPU."""
    steps_without_waiting(recorded(num_draft_tokens=max(ks), page_size=4, pages=160, shapes=covering(4, max(ks))), ks)


def test_what_has_changed_is_one_copy_and_nothing_is_none(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """With new pages every few tokens, other Ks, an end and an admission; no number is written by itself."""
    sent, per_step, ks = [], [], [0, 0, 0, 4, 2, *[0] * 20]
    monkeypatch.setattr(slots, "send", lambda *what: sent.append(what) or send(*what))
    shapes = [RoundShape(4, k, True) for k in (0, 2, 4)]
    engine = steered(Scripted(ks), recorded, page_size=4, pages=160, shapes=shapes)
    for i in (2, 5, 9):
        engine.add(request(i, max_tokens=20))
    card.waits.clear()
    while len(engine.rounds.on_device) < 3:
        engine.step()
    for _ in range(6):
        before = len(sent)
        engine.step()
        per_step.append(len(sent) - before)
    engine.finish("5", FinishReason.ABORTED)
    engine.add(request(7, max_tokens=3))
    while engine.has_work:
        engine.step()
    assert card.waits.keys() == READS
    assert max(per_step) == 1
    assert min(per_step) == 0


def test_a_slot_keeps_nothing_of_the_sequence_before() -> None:
    """Its pages may have been given away; what the new one writes beyond its own goes to nobody's."""
    state = loop_of(models()).state
    state.place(2, range(40), 50, (3, 4), SamplingParams(top_k=7), 2**64 - 5, num_draft=4, rejects=True)
    state.target.enter(2, [7, 8, 9])
    state.send()
    assert state.target.pages[2].tolist() == [7, 8, 9, *[40] * (state.target.width - 2)]
    assert state.whole[:, 2].tolist() == [40, 50, 1, 4, 1, -5, 7]
    state.place(2, [5], 9, (), SamplingParams(), 6)
    state.target.enter(2, [1])
    state.set_num_draft(2, 3)
    state.send()
    assert state.target.pages[2].tolist() == [1, *[40] * state.target.width]
    assert state.tracks.ends[2].tolist() == [-1] * 8
    assert state.whole[:, 2].tolist() == [1, 9, 1, 3, 0, 6, zoo.VOCAB]
    assert (state.target.pages[[0, 1, 3, 4]] == 40).all()


@pytest.mark.parametrize(("truncated", "most"), [(False, (13, 23)), (True, (15, 25))])
def test_a_round_is_few_launches(truncated: bool, most: tuple[int, int], card: Card, monkeypatch) -> None:
    """At K = 4, besides the models and the kernels of `RoundOps`: samplers and rows of all passes come at once."""
    pair = on_the_card()

    def unseen(forward):
        def run(*args, **kwargs):
            before, out = len(card.launched), forward(*args, **kwargs)
            del card.launched[before:]
            return out

        return run

    for model in pair:
        monkeypatch.setattr(model, "forward", unseen(model.forward))
    run, slots = round_of(pair, ops_on(torch.device("cuda")), 4, truncated=truncated)
    card.launched.clear()
    drafts = run.propose(slots)
    proposing = [name for name in card.launched if name != "choose"]
    card.launched.clear()
    run.verify(slots, drafts)
    verifying = [name for name in card.launched if name not in ("choose", "commit")]
    assert 0 < len(proposing) <= most[0], proposing
    assert 0 < len(verifying) <= most[1], verifying


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("k", [1, 3, 4])
def test_what_kernels_are_given_is_aligned(size: int, k: int) -> None:
    """At 16 bytes for every shape: a kernel that finds another alignment is compiled once more."""
    loop = loop_of(models())
    run, slots = loop.round_of(RoundShape(size, k, True)), torch.zeros(size, dtype=torch.int64)
    for layout, passes in ((run._draft, k), (run._target, 1)):
        laid = layout.of(slots)
        for i in range(passes):
            batch, samplers = layout.batch(laid, i, slots), layout.samplers(laid, i)
            given = [batch.positions, batch.kv_rows, laid.spans[i]]
            given += [samplers.temperature, samplers.seed, samplers.position, samplers.top_k]
            offsets = {tensor.storage_offset() * tensor.itemsize % 16 for tensor in given}
            assert offsets == {0}
            assert all(tensor.is_contiguous() for tensor in given)


@pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
@pytest.mark.slow(lowest=True)
def test_rounds_on_interpreted_kernels() -> None:
    """What the host does around our kernels waits for nothing, within a capture or not."""
    with here(interprets=True) as card:
        engine = recorded(draft=None, proposer="none", shapes=())
        card.waits.clear()
        run_and_check(engine, [request(1, max_tokens=3)])
        assert card.waits.keys() == READS
        assert "play" in card.told


def test_few_pages_preempt(card: Card) -> None:
    """Two that fit at first and not at their longest: the newer one makes room, comes back, and says the same."""
    two = [fakes.request(range(i, i + 17), name=str(i), max_tokens=18) for i in (3, 9)]
    said = fakes.run(recorded(pages=5, num_draft_tokens=2, shapes=covering(2, 2)), two)
    assert said.preempted
    check(said, two)


@pytest.mark.parametrize(("num_draft", "company"), [(3, False), (1, True)])
def test_rejection_in_rounds(num_draft: int, company: bool, card: Card) -> None:
    """For the same drafts the same tokens as in plain steps; coupled sequences beside it stay what they are.

    A round with any of them is run as it is; what follows once they have ended is played.
    """
    wishes = {"verification": Verification.REJECTION, "proposer": "model", "num_draft_tokens": num_draft}
    plain = [request(i, max_tokens=8) for i in range(6)]
    asked = [one if company and i % 2 == 0 else asking(one, **wishes) for i, one in enumerate(plain)]
    said = {}
    for loop in ("plain", "rounds"):
        options = {"loop": loop, "max_batch_tokens": 400, "max_batch_size": 8, "num_draft_tokens": num_draft}
        make = engine_of if loop == "plain" else partial(recorded, shapes=[RoundShape(8, num_draft, True)])
        said[loop] = fakes.run(make(**options), asked)
    assert said["rounds"].tokens == said["plain"].tokens
    stats = [{name: ended.stats for name, ended in one.finished.items()} for one in said.values()]
    if not company:
        assert stats[0] == stats[1]
    assert any(found.accepted for found in stats[1].values())
