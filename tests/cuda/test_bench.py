"""The benchmark runs; on a CPU with tiny models, so that a GPU's time is not spent on finding a typing error."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from benchmarks import cuda, cuda_engines, cuda_kernels, cuda_peers
from benchmarks.bare import DEFAULTS
from tests.interpreting import WHY_NOT

CPU = cuda_kernels.Card(cuda.torch.device("cpu"), "", 1.0, 1.0)
TINY = ("tiny", "tiny")


@pytest.mark.filterwarnings("ignore")  # transformers' own
def test_it_runs_without_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    small = ["--device", "cpu", "--shapes", *TINY, "--sizes", "1", "2", "--auto-sizes", "2", "--context", "40"]
    monkeypatch.setattr(cuda_peers, "continuous", lambda *_: 1.0)  # it starts threads, and is tested with its like
    monkeypatch.setattr(cuda, "continuous", lambda *_: 1.0)
    rest = ["--steps", "3", "--peer-tokens", "2", "6", "--out", str(tmp_path / "cuda.md")]
    monkeypatch.setattr(sys, "argv", ["cuda", *small, *rest])
    cuda.main()
    lines = (tmp_path / "cuda.md").read_text().splitlines()
    tables = {title: [] for title in ("Rounds", "AUTO", "Beside")}
    for line in lines:
        if line.startswith("## "):
            title = line.split()[1].strip(",")
        elif re.match(r"\| \d", line):
            tables[title].append([cell.strip() for cell in line.strip("|").split("|")])
    assert [row[:2] for row in tables["Rounds"]][::2] == [["1", "0"], ["2", "0"]]
    assert len(tables["AUTO"]) == 2
    assert [row[:2] for row in tables["Beside"]] == [["1", "assisted, K 4"], ["2", "continuous batching"]]


def test_acceptance_is_what_was_asked() -> None:
    """1 + a + a^2 + a^3 tokens for three drafts, each kept with probability a."""
    assert cuda_engines.expected_tokens(0.5, 3) == 1.875
    pair = cuda_engines.Pair.of(TINY, CPU)
    engine = cuda_engines.engine_of(pair, CPU, 0.5, 8, 600, 3)
    cuda_engines.fill(engine, 8, 4, 3)
    got = cuda_engines.measure(engine, CPU, 8, 60, 4)
    assert abs(got.tokens - 1.875) < 0.2
    assert got.device_seconds > 0
    cuda_engines.empty(engine)
    assert not engine.has_work


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("acceptance", [0.0, 0.5, 1.0])
def test_transformers_agree_as_often_as_was_asked(acceptance: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target's passes over 60 tokens with 3 drafts each tell how many were kept."""
    pair = cuda_engines.Pair.of(TINY, CPU, "sdpa")
    passes = []
    pair.target.register_forward_pre_hook(lambda *_: passes.append(1))
    monkeypatch.setattr(cuda_peers, "seconds_per_token", lambda run, *_: run(60) is None or 1.0)
    cuda_peers.assisted(pair, CPU, acceptance, 8, 3, (1, 60))
    assert abs(60 / len(passes) - cuda_engines.expected_tokens(acceptance, 3)) < 0.45


def test_bare_options_are_those_of_the_engine() -> None:
    config = pytest.importorskip("engine.config", reason="the engine's options need pydantic")
    fields = {name: field.default for name, field in config.EngineConfig.model_fields.items() if name != "target"}
    assert fields == DEFAULTS


def test_nothing_is_needed_that_a_gpu_machine_may_lack() -> None:
    """The two commands import with torch, transformers, triton, pytest and hypothesis alone."""
    script = """
        import sys
        LACKING = {"pydantic", "pydantic_core", "pydantic_settings", "llguidance", "fastapi", "uvicorn", "jsonschema",
                   "google", "pytest_asyncio", "openai"}
        class Lacking:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] in LACKING:
                    raise ModuleNotFoundError(f"there is no {name}", name=name)
        sys.meta_path.insert(0, Lacking())
        import benchmarks.cuda, tests.loops, tests.conftest
    """
    root = Path(__file__).resolve().parents[2]
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], cwd=root, check=True)


@pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
def test_tables_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kernel runs once, interpreted, over sizes that are small."""
    monkeypatch.setattr(cuda_kernels, "graph_seconds", lambda call, _device: (call(), 1.0)[1])
    monkeypatch.setattr(cuda_kernels, "DRAWN", (2,))
    assert len(list(cuda_kernels.sampling_table(CPU, 300))) == 4
