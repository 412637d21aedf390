"""Rounds are recorded at load and in an idle engine, within memory and time, and never while a request waits."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from itertools import count

import pytest
import torch

from pilotfish.engine.attention import registry
from pilotfish.engine.config import EngineConfig
from pilotfish.engine.device_loop.graph_cache import GraphCache, RoundShape, covering, in_order_of_worth, sizes_for
from pilotfish.engine.device_loop.graphs import Graphs, MemoryBudget, MemoryUse
from pilotfish.engine.device_loop.round import Round, RoundOps, Run
from pilotfish.engine.engine import Engine
from pilotfish.engine.errors import ModelError
from pilotfish.engine.kernels import faults
from pilotfish.engine.model.runner import ModelRunner
from pilotfish.engine.startup.calibrate import calibrate
from pilotfish.engine.startup.memory import GIB, graph_bytes
from pilotfish.engine.startup.warm import make_ready
from tests.card import Card, here
from tests.engine.device_loop.test_round import run_and_check
from tests.engine.startup.test_memory import LLAMA_8B
from tests.loops import PLAIN, AnyK, engine_of, recorded, request, steered


class Recorder:
    """Notes what it records, as long as it may, and runs it as it is, or as `record` has it; `fault` may raise."""

    def __init__(
        self,
        room: int = 999,
        fault: Callable[[Round], None] = lambda _: None,
        record: Callable[[Round], Run] = lambda round_: round_,
    ) -> None:
        self.room, self.fault, self._record = room, fault, record
        self.made, self.ran, self.is_open = list[Round](), list[Round](), True

    @property
    def has_room(self) -> bool:
        return len(self.made) < self.room

    def __call__(self, round_: Round):
        assert self.is_open, "a round is recorded in a request"
        self.fault(round_)
        self.made.append(round_)
        play = self._record(round_)
        return lambda slots, between: (self.ran.append(round_), play(slots, between))[1]


def recorded_by(recorder: Recorder, engine: Engine, places: int = 6, drafts: int = 4, **options) -> Engine:
    rounds = engine.rounds
    rounds.graphs = GraphCache(rounds.round_of, recorder, covering(places, drafts), **options)
    return engine


def small(**options) -> Engine:
    """An engine with few shapes: 1, 2 and 4 places, up to 2 drafts, with cuts and without."""
    return engine_of(max_batch_size=4, num_draft_tokens=2, **options)


def small_on_the_card(**options) -> tuple[Engine, Callable[[Round], Run]]:
    """The same on the card, and what records its rounds."""
    engine = recorded(shapes=(), max_batch_size=4, num_draft_tokens=2, **options)
    return engine, Graphs(MemoryBudget(1, lambda: MemoryUse(0, 0)))


def test_shapes_in_order_of_worth() -> None:
    shapes = in_order_of_worth(6, 4)
    assert len(shapes) == len(set(shapes)) == 4 * 5 * 2
    assert shapes[:5] == covering(6, 4) == [RoundShape(8, k, True) for k in (4, 0, 1, 2, 3)]
    assert shapes[5:7] == [RoundShape(1, 4, False), RoundShape(1, 0, False)]
    for shape in shapes:
        assert any(cover.can_replace(shape) for cover in covering(6, 4))
    assert in_order_of_worth(1, 0) == [RoundShape(1, 0, True), RoundShape(1, 0, False)]
    assert sizes_for(200)[-3:] == [128, 192, 256]


def test_a_kernel_that_does_not_fit_leaves_its_shapes_to_others(caplog: pytest.LogCaptureFixture) -> None:
    def fault(round_: Round) -> None:
        if round_.k == 1:
            raise faults()[0]("out of resource: shared memory")

    recorder = Recorder(fault=fault)
    engine = recorded_by(recorder, steered(AnyK(1), small), 4, 2)
    engine.rounds.graphs.record(shape for shape in in_order_of_worth(4, 2) if shape.size == 4)
    assert len(recorder.made) == 4
    assert "rounds of 4 places and 1 drafts are not recorded: out of resource" in caplog.text
    recorder.is_open = False
    run_and_check(engine, [request(i, max_tokens=12) for i in range(6)])


def test_a_capture_that_breaks_off_ends_recording(caplog: pytest.LogCaptureFixture) -> None:
    def fault(round_: Round) -> None:
        if round_.size == 2:
            raise RuntimeError("out of memory")

    recorder, told = Recorder(fault=fault), list[str]()
    engine = recorded_by(recorder, small(), 4, 2)
    engine.rounds.record(told.append)
    assert {round_.size for round_ in recorder.made} == {4, 1}
    assert caplog.text.count("not recorded") == 1
    assert told[0] == "recording rounds: 1 of 18"
    recorder.is_open = False
    run_and_check(engine, [request(i, max_tokens=4) for i in (1, 2, 5)])
    assert {round_.size for round_ in recorder.ran} <= {4, 1}


def test_recording_keeps_to_its_time() -> None:
    recorder, ticks = Recorder(), iter(range(0, 10_000, 25))
    recorded_by(recorder, small(), clock=lambda: next(ticks)).rounds.record()
    assert len(recorder.made) == 3  # 25, 50 and 75 seconds


def test_an_idle_engine_records_what_was_missed_often(card: Card) -> None:
    """In the place of the shape whose last use is longest ago, but of none that stands in for all."""
    engine, graphs = small_on_the_card()
    recorder = Recorder(room=5, record=graphs)
    recorded_by(recorder, engine, 4, 2)
    engine.rounds.record()
    graphs = engine.rounds.graphs
    used, unused = RoundShape(1, 2, False), RoundShape(1, 0, False)
    assert set(graphs._recorded) == {*covering(4, 2), used, unused}
    for _ in range(64):
        assert graphs.of(1, 2, truncated=False, rejects=False)[0] == 1
        assert graphs.of(2, 1, truncated=False, rejects=False)[0] == 4
    assert len(recorder.made) == 5
    engine.idle_tick()
    assert set(graphs._recorded) == {*covering(4, 2), used, RoundShape(2, 1, False)}
    engine.idle_tick()
    assert len(recorder.made) == 6
    # The new one has the memory of the one that was given up, and the others go on as before.
    engine.scheduler.round_control = AnyK(2)
    run_and_check(engine, [request(i, max_tokens=12) for i in range(6)])
    assert {round_.size for round_ in recorder.ran} == {2, 4}


@pytest.mark.slow
def test_no_timing_holds_a_capture() -> None:
    """Recording takes an age on this clock, and a round no time: what control learns is a round's price."""
    now, learned = [0.0], list[float]()
    with here(clock=lambda: now[0]):
        engine, graphs = small_on_the_card(speculation="auto")
        recorder = Recorder(fault=lambda _: now.__setitem__(0, now[0] + 1.4), record=graphs)
        recorded_by(recorder, engine, 4, 2, clock=lambda: now[0])
        learn = engine.round_control.learn
        engine.round_control.learn = lambda done: (learned.append(done.seconds), learn(done))
        make_ready(engine, is_compiled=True)
        recorder.is_open = False
        calibrate(engine, 1e9)
    assert len(recorder.made) == 18
    assert learned
    assert max(learned) == 0


@pytest.mark.parametrize(
    ("here", "others", "is_left"),
    [(20, 0, True), (40, 0, False), (-5, 0, True), (0, 20, True), (0, 40, False), (20, 15, False), (20, -15, True)],
)
def test_a_budget_is_what_is_gone(here: int, others: int, is_left: bool) -> None:
    """Bytes that torch has taken here, and those that somebody else has, such as the driver for graphs."""
    use = iter([MemoryUse(100, 10), MemoryUse(100 + here + others, 10 + here)])
    room = MemoryBudget(30, lambda: next(use))
    with room.taken():
        pass
    assert room.is_left is is_left


def test_what_another_process_takes_meanwhile_ends_no_recording(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gigabyte between any two looks at the device, as where others load models on it; no graph is of such a size."""
    free = count(GIB * 80, -GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (next(free), GIB * 80))
    assert set(covering(6, 4)) <= recorded().rounds.graphs._recorded.keys()


def test_memory_for_rounds_follows_from_their_shapes() -> None:
    def gib(**options) -> float:
        return graph_bytes(EngineConfig(target="t", **options), LLAMA_8B) / GIB

    assert gib(loop="plain") == 0
    assert gib(max_batch_size=8) < gib(draft="d", max_batch_size=8) < gib(draft="d", num_draft_tokens=16)
    assert 1.4 < gib(draft="d", num_draft_tokens=4) < 2.5  # 90 shapes


def test_rehearsals_run_every_kind_of_plain_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk of full size, chunks beside decoding, decoding alone in several batches; control hears of none."""
    passes, told = list[tuple[int, ...]](), list[str]()
    forward = ModelRunner.forward

    def noting(runner, feeds):
        passes.append(tuple(len(feed.tokens) for feed in feeds))
        return forward(runner, feeds)

    monkeypatch.setattr(ModelRunner, "forward", noting)
    engine = engine_of(speculation="auto", pages=60)
    make_ready(engine, progress=told.append, is_compiled=True)
    decoding = {len(rows) for rows in passes if set(rows) == {1}}
    assert {1, 6} <= decoding
    assert (32,) in passes
    assert any(1 <= min(rows) <= 5 and max(rows) > 16 for rows in passes if len(rows) == 2)
    assert any(rows.count(5) > 2 for rows in passes), "drafts are verified in plain steps, too"
    assert not engine.rounds.on_device
    assert engine.control.times.target.count == engine.round_control.times.target.count == 0
    assert "compiling for plain passes: 1 of" in told[0]
    assert told[-1] == "warming up"


OUT_OF_RESOURCE = faults()[0]("out of resource: shared memory, Required: 300000")


def refusing(*args, fault: Exception = OUT_OF_RESOURCE, **kwargs):
    raise fault


@pytest.mark.parametrize("fault", [OUT_OF_RESOURCE, RuntimeError("out of resource: capture")])
def test_attention_that_does_not_fit_means_plain_steps(
    fault: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Triton's error is none of Python's own kinds: it would end the load."""
    ops = RoundOps(partial(refusing, fault=fault), PLAIN.commit)
    monkeypatch.setattr("pilotfish.engine.startup.device_loop.ops_on", lambda _: ops)
    with pytest.raises(ModelError, match="loop=rounds is not supported: the first round failed: out of resource"):
        engine_of()
    for module in ("build", "device_loop"):
        monkeypatch.setattr(f"pilotfish.engine.startup.{module}.wants_rounds", lambda *_: True)
    with caplog.at_level(logging.INFO):
        assert engine_of(loop="auto").rounds.name == "plain"
    assert "loop: plain (the first round failed" in caplog.text


def test_attention_that_does_not_fit_gives_way_to_torchs(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    choose = registry.choose
    monkeypatch.setattr(
        registry, "choose", lambda name, *a, **k: refusing if name in ("auto", "triton") else choose(name, *a, **k)
    )
    engine = engine_of(attention="auto", loop="plain")
    assert "attention on cpu: falling back to torch, the kernel failed: out of resource" in caplog.text
    run_and_check(engine, [request(1)])
    with pytest.raises(ModelError, match=r"attention is triton; its kernel cannot run on this device: out of resource"):
        engine_of(attention="triton", loop="plain")
