"""What the measurements on a card claim, held on a CPU: acceptance, agreement, what is timed and what is read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import ContinuousBatchingConfig
from transformers.generation.continuous_batching import cache

from benchmarks.cuda import engines
from benchmarks.cuda.arenas import PAGE, Arenas
from benchmarks.cuda.card import Card
from benchmarks.cuda.catalogue import COMMANDS
from benchmarks.cuda.parts import checks, decoding, peers, tokens
from benchmarks.cuda.report import Folder, PartReport
from benchmarks.cuda.setting import Setting
from benchmarks.cuda.shapes import Heads
from pilotfish.engine.device_loop.graph_cache import GraphCache
from pilotfish.engine.device_loop.round import Round
from tests.card import here

CPU = Card(torch.device("cpu"), "", 1.0, 1.0, 2**14)
H100_CACHE = 50 << 20  # bytes
FAMILIES = tokens.families()
TINY = Setting.of("cpu", "tiny", "tiny")


@pytest.mark.slow
def test_acceptance_is_what_was_asked() -> None:
    """1 + a + a^2 + a^3 tokens for three drafts, each kept with probability a."""
    assert engines.expected_tokens(0.5, 3) == 1.875
    pair = engines.RandomPair.of(CPU, "tiny", "tiny")
    engine = engines.engine_of(pair, CPU, 8, 600, 0.5, 3)
    engines.fill(engine, 8, 4, 3)
    got = engines.measure(engine, CPU, 8, 30)
    assert abs(got.tokens - 1.875) < 0.2
    assert got.device_seconds > 0
    engines.empty(engine)
    assert not engine.has_work


@pytest.mark.slow
def test_no_timed_step_is_the_first_of_its_size_and_number_of_drafts(monkeypatch, tmp_path):
    """The first records graphs, which takes as long as many steps: AUTO, which may choose any K, has practised all."""
    known, fresh, timing = set(), [], []
    of, timed = GraphCache.of, engines.timed

    def watched(self, count, k, **kinds):
        size, run = of(self, count, k, **kinds)
        if timing and (id(self), size, k) not in known:
            fresh.append((size, k))
        known.add((id(self), size, k))
        return size, run

    def marked(*args):
        timing.append(True)
        found = timed(*args)
        timing.clear()
        return found

    monkeypatch.setattr(GraphCache, "of", watched)
    monkeypatch.setattr(engines, "timed", marked)
    folder = Folder(tmp_path, "x")
    folder.begin()
    decoding.auto(replace(TINY, strange=1, steps=12, context=8), PartReport(folder, "auto"))
    assert fresh == []
    assert len({k for _, _, k in known}) == decoding.MOST_AUTO + 1


PLAYS = {"tokens": 30, "waits": 200, "plain": 40, "rounds": 200}  # of graphs, at least


def run_on_the_card(name: str, folder: Path, patch: pytest.MonkeyPatch) -> int:
    """Run a part on tiny models, of one family, in float32 and with few drafts; how often a graph was played."""
    (part,) = (part for part in COMMANDS["first-light"] if part.name == name)
    run, report = part.load(), Folder(folder, "x")
    report.begin()
    patch.setattr(Card, "measured", classmethod(lambda cls, device: cls(torch.device(device), "", 1.0, 1.0, 2**14)))
    patch.setattr(tokens, "families", lambda: {"llama": FAMILIES["llama"]})
    patch.setattr(tokens, "_reproducible", lambda *_: [])
    patch.setattr(tokens, "NUM_DRAFT", 1)
    with here() as card:
        run(Setting.of("cuda", "tiny", "tiny"), PartReport(report, name))
    return card.told.count("play")


@pytest.mark.parametrize("name", ["tokens", *(pytest.param(name, marks=pytest.mark.slow) for name in list(PLAYS)[1:])])
def test_a_part_plays_what_it_has_recorded(name, monkeypatch, tmp_path):
    """All its rounds are graphs."""
    monkeypatch.setattr(Round, "__call__", lambda self, *_: pytest.fail(f"{self.size} places are not recorded"))
    assert run_on_the_card(name, tmp_path, monkeypatch) >= PLAYS[name]


@pytest.mark.slow
def test_tokens_of_rounds_that_nobody_recorded_are_refused(monkeypatch, tmp_path):
    """Graphs of one place, which every engine tries out, would say little."""
    monkeypatch.setattr(tokens, "record", lambda *_, **__: None)
    with pytest.raises(AssertionError, match="not every round was a graph"):
        run_on_the_card("tokens", tmp_path, monkeypatch)


@pytest.mark.parametrize(("size", "most"), [(1, 12), (8, 2), (32, 1)])
def test_attention_over_long_contexts_reads_memory_and_not_the_cache(size, most):
    """33.5 MB of K/V at batch 1 fit an H100's cache: calls go round arenas that together are four times as large."""
    count = Arenas.count_of(2 * 2 * size * 8192 * 8 * 128, H100_CACHE)
    assert count * 2 * 2 * size * 8192 * 8 * 128 >= 4 * H100_CACHE
    assert count <= most
    small = Arenas.of(CPU, Heads.of("tiny"), [1], [69])
    assert len(small.kv) > 1
    assert len(small.kv) * small.bytes_each >= 4 * CPU.cache_bytes


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch's matmul of fp8 rows was for CUDA alone")
def test_the_check_of_fp8_finds_a_matmul_that_is_wrong(monkeypatch):
    matmuls = [check for check in checks._fp8_checks(TINY, CPU) if "of a" not in check.kernel]
    assert all(check.differs() <= check.most for check in matmuls)
    matmul = checks.Fp8Linear.forward
    monkeypatch.setattr(checks.Fp8Linear, "forward", lambda self, x: matmul(self, x) * 1.1)
    assert not any(check.differs() <= check.most for check in matmuls)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # transformers' own
def test_continuous_batching_runs_with_the_pages_that_were_asked_for(monkeypatch):
    """The real configuration and the real loop; a page's size has the name that this version of transformers knows."""
    monkeypatch.setattr(cache, "get_device_and_memory_breakdown", lambda: (torch.device("cpu"), 2**33, 0, 0))
    made = []
    config_of = ContinuousBatchingConfig.__init__
    monkeypatch.setattr(
        ContinuousBatchingConfig,
        "__init__",
        lambda self, *args, **named: (config_of(self, *args, **named), made.append(self))[0],
    )
    pair, told = engines.RandomPair.of(CPU, "tiny", None, "sdpa"), []
    monkeypatch.setattr(peers, "tokens_per_second", lambda run, *_, **__: told.append([run(2), run(9)]) or 1.0)
    assert peers.continuous(pair, CPU, 3, 40, (2, 9)) == 3.0
    assert told
    assert PAGE in (getattr(made[0], "page_size", None), getattr(made[0], "block_size", None))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_transformers_agree_as_often_as_was_asked(monkeypatch):
    """The target's passes over 60 tokens with 3 drafts each tell how many were kept."""
    pair, passes = engines.RandomPair.of(CPU, "tiny", "tiny", "sdpa"), []
    pair.target.register_forward_pre_hook(lambda *_: passes.append(1))
    monkeypatch.setattr(peers, "tokens_per_second", lambda run, *_: run(60) is None or 1.0)
    peers.assisted(pair, CPU, 0.7, 8, 3, (1, 60))
    assert abs(60 / len(passes) - engines.expected_tokens(0.7, 3)) < 0.45
