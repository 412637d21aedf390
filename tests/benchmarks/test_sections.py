"""`python -m benchmarks` from options to page, on models so small that the figures mean nothing."""

from __future__ import annotations

import json
from functools import partial

import pytest

from benchmarks.__main__ import SECTIONS, main
from benchmarks.harness.report import part, table
from benchmarks.harness.timing import abreast
from benchmarks.harness.turns import interleave, promising, ratios, take_turns, worth_while
from tests.benchmarks.turns import turn

OFFLINE = ["verify", "grid"]
MODELS = "--shape tiny --draft-shape tinier --threads 1"
SMALL = f"{MODELS} --tokens 8 --rounds 1 --prompt 16 --batches 1 --rates 0.8 --contexts 16 --drafts 2"


@pytest.mark.slow
def test_offline_sections_measure_and_write(tmp_path, capsys):
    out = tmp_path / "cpu"
    options = [*SMALL.split(), "--models", str(tmp_path / "models"), "--out", str(tmp_path)]
    main([*OFFLINE, *options])
    page = out.with_suffix(".md").read_text()
    for section in SECTIONS:
        assert (f"## {section.title}" in page) == (section.name in OFFLINE)
    for name in OFFLINE:
        found = json.loads((out / f"{name}.json").read_text())
        assert found["rows"]
        assert found["command"].startswith(f"python -m benchmarks {OFFLINE[0]}")
        assert {"machine", "versions", "commit"} <= found.keys()
    assert "AUTO is" in capsys.readouterr().out


def test_a_cell_without_a_figure_is_empty():
    assert table({"a": "{a}", "b": "{b:.1f}"}, [{"a": 1}, {"a": 2, "b": 0.25}])[2:] == ["| 1 |  |", "| 2 | 0.2 |"]


def test_every_section_can_be_shown_without_rows():
    told = {"command": "c", "machine": "m", "versions": "v", "commit": "0", "models": "s", "rows": [], "pictures": []}
    for section in SECTIONS:
        assert section.title in part(section, told, "cpu")


def test_ways_take_turns_forwards_and_backwards():
    called = []
    ways = {
        name: partial(lambda n, s: called.append(n) or turn(s), name, speed) for name, speed in (("a", 10), ("b", 2))
    }
    turns = interleave(ways, 2)
    assert called == ["a", "b", "a", "b", "b", "a"]
    assert [len(mine) for mine in turns.values()] == [2, 2]
    assert ratios(turns["a"], turns["b"]) == [pytest.approx(5)] * 2


def test_a_way_that_ends_is_left_out_and_the_others_go_on():
    fails, told = iter([False, True]), []

    def ending():
        if next(fails):
            raise TimeoutError("it is gone")
        return turn(1)

    turns = take_turns({"a": lambda: turn(10), "b": ending}, 3, told.append, ends=TimeoutError)
    assert {name: len(mine) for name, mine in turns.items()} == {"a": 3}
    assert "round 2, b: it is gone" in told


def test_a_way_that_seems_slow_has_a_second_try_and_who_must_stay_stays():
    speeds = iter([2, 9])
    ways = {"a": lambda: turn(10), "b": lambda: turn(next(speeds)), "c": lambda: turn(2)}
    first = {name: way() for name, way in ways.items()}
    assert worth_while(first, ways, 0.5, ()) == ["a", "b"]
    assert promising(first, 0.5, ["c"]) == ["a", "b", "c"]


def test_engines_abreast_use_the_same_time():
    order = []

    class Run:
        def __init__(self, name, steps):
            self.name, self.steps, self.seconds = name, list(steps), 0.0

        @property
        def is_over(self):
            return not self.steps

        def step(self):
            order.append(self.name)
            self.seconds += self.steps.pop(0)

        def turn(self):
            return self.name, self.seconds

    turns = abreast({"a": Run("a", [1, 1, 1]), "b": Run("b", [2.5, 2.5])})
    assert order == ["a", "b", "a", "a", "b"]
    assert turns == {"a": ("a", 3), "b": ("b", 5.0)}
