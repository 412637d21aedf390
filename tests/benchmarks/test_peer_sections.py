"""Sections beside other programs, on programs made up here: who is asked, in which condition, and what is told."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from benchmarks.harness.lab import BenchOptions
from benchmarks.harness.meter import CpuUsage
from benchmarks.harness.report import table
from benchmarks.harness.synthetic import Rule
from benchmarks.harness.turns import Turn
from benchmarks.peers.catalogue import OURS, PEERS, PeerSetting, pythons
from benchmarks.peers.remote import NotMeasured
from benchmarks.sections import peer_prompts, peers

RULE = Rule(600, 1)


class Program:
    """Says what the rule says, so many tokens in a second."""

    def __init__(self, peer):
        self.peer = peer

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def ready(self):
        if self.peer.fails:
            raise NotMeasured("no model here")
        return "program 1"

    def run(self, prompts, tokens, k):
        self.peer.asked.append((len(prompts), len(prompts[0]), k, self.peer.busy[0]))
        if len(prompts[0]) > self.peer.longest:
            raise NotMeasured("too long")
        texts = [RULE.text(prompt[-1], tokens) for prompt in prompts]
        made = len(prompts) * tokens / (1 + self.peer.busy[0])
        return Turn(texts, 1 / self.peer.speed, made, 1 / self.peer.speed, CpuUsage(1.0, 1.0, 0.0, 0.0))


@dataclass(eq=False)
class FakePeer:
    name: str
    speed: float
    busy: list[int]
    is_ours: bool = False
    fails: bool = False
    longest: int = 10**6
    plain: bool = True
    speculates: bool = False
    auto: bool = False
    most: int = 64
    drafts: int = 0

    def __post_init__(self):
        self.asked = []

    def start(self, setting):
        return Program(self)


@pytest.fixture
def lab(monkeypatch):
    """A lab with three programs: ours, one half as fast that is told its K, and one that is not there."""
    busy = [0]

    @contextmanager
    def neighbours(count):
        busy[0] = count
        yield
        busy[0] = 0

    there = [
        FakePeer(OURS, 4.0, busy, is_ours=True, speculates=True),
        FakePeer("other int8", 2.0, busy, speculates=True, plain=True, drafts=3, longest=100),
        FakePeer("third int8", 2.0, busy, fails=True),
    ]
    for module in (peers, peer_prompts):
        monkeypatch.setattr(module, "neighbours", neighbours)
        monkeypatch.setattr(module, "chosen", lambda options: there)
    monkeypatch.setattr(peers, "matrix_bytes", lambda path: 10**9)
    monkeypatch.setattr(peers, "int8_of", lambda path: path)
    monkeypatch.setattr(peers, "Memory", lambda threads: SimpleNamespace(bandwidth=lambda: 10.0))
    options = BenchOptions(threads=1, rounds=2, batches=(2,), contexts=(16, 200), drafts=(5,), neighbours=(0, 1))
    pair = SimpleNamespace(rule=RULE, target="target")
    lab = SimpleNamespace(options=options, pair=pair, told=[], drafts=lambda _: [5], peers=there)
    lab.tell = lab.told.append
    return lab


def test_both_conditions_are_measured_in_one_run(lab):
    rows = peers.measure(lab)
    measured = [row for row in rows if row.get("speeds")]
    assert {(row["neighbours"], row["name"], row["k"]) for row in measured} == {
        (count, name, k) for count in (0, 1) for name, k in ((OURS, 0), (OURS, 5), ("other int8", 3))
    }
    ours, other = ({asked[3] for asked in peer.asked} for peer in lab.peers[:2])
    assert ours == other == {0, 1}
    by_condition = {row["neighbours"]: row["tokens_per_second"] for row in measured if row["k"] == 3}
    assert by_condition[0] == 2 * by_condition[1]
    assert [row["remark"] for row in rows if row["name"] == "third int8"] == ["not measured: no model here"]
    assert any("Batch 2 beside 1 busy, plain" in line for line in peers.verdict(rows))
    assert any(line.startswith("- Batch 2, plain") for line in peers.verdict(rows))


@pytest.mark.parametrize("fails", [True, False])
def test_where_none_of_ours_is_there_others_are_told_without_a_ratio(lab, fails):
    """Our entries for GGUF need llama.cpp, which rounds the files."""
    ours, other, _ = lab.peers
    ours.fails, other.fails = True, fails
    rows = peers.measure(lab)
    assert [row["remark"] for row in rows if row["name"] == OURS] == ["not measured: no model here"]
    told = {row["remark"] for row in rows if row["name"] == "other int8"}
    assert told == {"not measured: no model here" if fails else "first turns alone: nothing of ours runs beside it"}
    assert not peers.verdict(rows)


def test_a_prompt_is_timed_to_its_first_token(lab):
    rows = peer_prompts.measure_prompts(lab)
    by_cell = {(r["prompt"], r["neighbours"], r["name"]): r for r in rows if "prompt" in r}
    assert by_cell[16, 0, OURS]["tokens_per_second"] == pytest.approx(64)
    assert by_cell[16, 0, "other int8"]["ours_over_it"] == pytest.approx(2)
    assert by_cell[200, 1, "other int8"]["remark"] == "not measured: too long"
    assert {row["name"] for row in rows if "prompt" not in row} == {"third int8"}
    assert peer_prompts.verdict(rows)[0] == f"- Prompt of 16: 64 tokens/s ({OURS}), 2.00 times other int8."
    assert len(table(peer_prompts.PROMPTS.columns, rows)) == 2 + len(rows)


def test_a_start_is_timed_to_the_first_token(lab):
    rows = {row["name"]: row for row in peer_prompts.measure_starts(lab)}
    assert rows["third int8"]["remark"] == "not measured: no model here"
    for name in (OURS, "other int8"):
        assert len(rows[name]["all_first"]) == lab.options.rounds
        assert rows[name]["first"] >= rows[name]["ready"] > 0
    assert rows[OURS]["ours_over_it"] == 1


def names(*wanted):
    return [peer.name for peer in peers.chosen(BenchOptions(peers=wanted))]


def test_programs_are_chosen_by_name():
    ours = [peer.name for peer in PEERS if peer.is_ours]
    assert len(peers.chosen(BenchOptions())) == len(PEERS)
    assert names() == ours
    assert names("openvino int8") == [*ours, "openvino int8"]
    assert names(OURS, "openvino int8") == [OURS, "openvino int8"]
    assert set(names("q8_0")) - set(ours) == {"llama.cpp q8_0", "ik_llama.cpp q8_0"}


def test_a_program_may_have_a_python_of_its_own(tmp_path):
    setting = PeerSetting(None, pythons(["a/python", "vllm=b/python"]), 1, 1, 1, tmp_path)
    assert setting.python("vllm") == "b/python"
    assert setting.python("openvino") == "a/python"
    assert setting.python("ours") == setting.python("transformers") == sys.executable
    assert pythons([]) == {"": sys.executable}
    with pytest.raises(ValueError, match=r"peers_python: .* for .vlm."):
        pythons(["vlm=b/python"])
