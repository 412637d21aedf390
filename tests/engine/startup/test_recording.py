"""A successor serves as soon as rounds that cover all others are recorded; the others are while it is idle."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pilotfish.engine.device_loop.graph_cache import GraphCache, RoundShape, covering, in_order_of_worth
from pilotfish.engine.device_loop.results import no_progress
from pilotfish.engine.device_loop.round import Round
from pilotfish.engine.engine import Engine
from pilotfish.engine.startup import warm
from tests import fakes
from tests.engine.device_loop.test_graph_cache import Recorder
from tests.loops import AnyK, plainly, request, steered

SECONDS = 0.3  # that a recording takes on the clock here
COVERING, EVERY = covering(6, 4), in_order_of_worth(6, 4)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def record(self, _: Round) -> None:
        self.now += SECONDS


@pytest.fixture
def made() -> tuple[Clock, Recorder, Engine]:
    clock, engine = Clock(), steered(AnyK(1))
    recorder = Recorder(fault=clock.record)
    engine.rounds.graphs = GraphCache(engine.rounds.round_of, recorder, COVERING, clock=clock)
    return clock, recorder, engine


def shapes_of(rounds: list[Round]) -> list[tuple[int, int]]:
    return [(round_.size, round_.k) for round_ in rounds]


def serve(engine: Engine, recorder: Recorder, numbers: range) -> None:
    """Nothing is recorded meanwhile, and tokens are those of plain decoding."""
    asked = [request(i, max_tokens=12) for i in numbers]
    recorder.is_open = False
    tokens = fakes.run(engine, asked).tokens
    recorder.is_open = True
    assert tokens == {one.request_id: plainly(one)[0] for one in asked}


@pytest.mark.parametrize(
    ("options", "seconds", "num_recorded"),
    [
        ({"is_successor": True, "defers": True}, 4.0, len(COVERING)),
        ({"defers": True}, 0.0, len(COVERING)),
        ({"defers": True}, 4.0, len(EVERY)),  # it measures rounds as requests will meet them
        ({"is_successor": True}, 4.0, len(EVERY)),  # nobody tells it when it is idle
        ({"calibrates": False}, 4.0, len(EVERY)),
    ],
)
def test_what_covers_is_all_that_a_successor_waits_for(options, seconds, num_recorded, made, monkeypatch) -> None:
    clock, recorder, engine = made
    monkeypatch.setattr(warm, "build_engine", lambda *_: engine)
    monkeypatch.setattr(warm, "pick_device", lambda _: fakes.torch.device("cuda"))
    monkeypatch.setattr(warm, "rehearsals", lambda _: ())
    monkeypatch.setattr(warm, "_text", lambda _: ())
    monkeypatch.setattr(warm, "Calibration", lambda *_, **__: SimpleNamespace(is_over=True))
    monkeypatch.setattr(engine, "recall", lambda: False)
    engine.config.warm_up_seconds = seconds
    assert warm.load(engine.config, **options) is engine
    assert len(recorder.made) == num_recorded
    assert clock.now == pytest.approx(SECONDS * num_recorded)
    serve(engine, recorder, range(2))


def test_an_idle_engine_records_one_at_a_time_the_missed_ones_first(made) -> None:
    clock, recorder, engine = made
    engine.rounds.record(no_progress, later=True)
    assert shapes_of(recorder.made) == [(8, k) for k in (4, 0, 1, 2, 3)]
    serve(engine, recorder, range(1))  # one sequence, which nothing that is recorded fits
    assert {round_.size for round_ in recorder.ran} == {8}
    before = clock.now
    assert engine.idle_tick()
    assert clock.now - before == pytest.approx(SECONDS)
    assert recorder.made[-1].size == 1
    while engine.idle_tick():
        if len(recorder.made) == len(EVERY) // 2:
            serve(engine, recorder, range(6))
    assert len(recorder.made) == len(engine.rounds.graphs) == len(EVERY)
    recorder.ran.clear()
    serve(engine, recorder, range(1))
    assert {round_.size for round_ in recorder.ran} == {1}
    assert not engine.idle_tick()


def test_what_has_no_room_or_breaks_off_is_not_tried_again(made) -> None:
    _, recorder, engine = made
    engine.rounds.record(no_progress, later=True)
    recorder.room = len(COVERING) + 2
    assert [engine.idle_tick() for _ in range(4)] == [True, True, False, False]
    assert len(recorder.made) == recorder.room
    recorder.room, recorder.fault = 999, broken
    engine.rounds.record(no_progress, later=True)
    assert not engine.idle_tick()
    assert engine.rounds.graphs._refused == {RoundShape(1, 1, False)}
    serve(engine, recorder, range(3))


def broken(_: Round) -> None:
    raise RuntimeError("the capture broke off")
