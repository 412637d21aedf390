"""The benchmark runs; on a CPU with tiny models, so that a GPU's time is not spent on finding a typing error."""

from __future__ import annotations

import re
import sys

import pytest

from benchmarks import cuda, cuda_kernels
from tests.interpreting import WHY_NOT


def test_it_runs_without_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    small = ["--device", "cpu", "--shapes", "tiny", "tiny", "--sizes", "2", "--context", "40", "--rounds", "2"]
    monkeypatch.setattr(sys, "argv", ["cuda", *small, "--out", str(tmp_path / "cuda.md")])
    cuda.main()
    rows = [line for line in (tmp_path / "cuda.md").read_text().splitlines() if re.match(r"\| 2 \|", line)]
    assert rows[0].split("|")[2].strip() == "0"
    assert len(rows) == 2


def test_acceptance_is_what_was_asked() -> None:
    """1 + a + a^2 + a^3 tokens for three drafts, each kept with probability a."""
    assert cuda.expected_tokens(0.5, 3) == 1.875
    card = cuda.Card(cuda.torch.device("cpu"), "", 1.0, 1.0)
    pair = cuda.Pair.of(("tiny", "tiny"), card)
    cuda.torch.manual_seed(0)
    loop = cuda.loop_of(pair, card, 0.5, 8, 400, 3)
    got = cuda.measure(loop, card, 8, 4, 3, 40)
    assert abs(got.tokens - 1.875) < 0.25


@pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
def test_tables_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kernel runs once, interpreted, over sizes that are small."""
    monkeypatch.setattr(cuda_kernels, "graph_seconds", lambda call, _device: (call(), 1.0)[1])
    monkeypatch.setattr(cuda_kernels, "DRAWN", (2,))
    card = cuda.Card(cuda.torch.device("cpu"), "", 1.0, 1.0)
    assert len(list(cuda_kernels.sampling_table(card, 300))) == 4
