"""`pilotfish bench`: a row per batch and way, of the same tokens."""

from __future__ import annotations

import io
import json
from argparse import Namespace
from types import SimpleNamespace

import pytest

from pilotfish.server import cli
from pilotfish.server.commands import bench
from pilotfish.server.commands.bench import BenchRow, as_text
from pilotfish.server.commands.progress import Progress, TimeBudget

OPTIONS = ["--tokens", "8", "--rounds", "1", "--batches", "2", "--threads", "1", "--warm-up-seconds", "0"]


@pytest.mark.slow
def test_rows_of_the_embedded_pair(capsys):
    assert cli.main(["bench", "--json", *OPTIONS, "--proposer", "model"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["batch"], row["speculation"]) for row in rows] == [(2, way) for way in ("off", "fixed", "auto")]
    assert all(row["same_tokens"] for row in rows)
    assert rows[0]["gain"] == 1.0
    assert rows[0]["acceptance_rate"] is None
    assert rows[1]["acceptance_length"] > 1


@pytest.mark.parametrize("command", [["bench"], ["train-draft", "--out", "head"]], ids=["bench", "train-draft"])
def test_an_unsupported_model_is_reported(command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main([*command, str(tmp_path)]) == 2
    assert f"pilotfish {command[0]}: " in capsys.readouterr().err


def test_the_table_lines_up():
    rows = [BenchRow(1, "off", 100.0, 1.0, None, None, True), BenchRow(1, "auto", 150.0, 1.5, 0.75, 3.25, False)]
    head, plain, auto = as_text(rows, "title").splitlines()[2:]
    assert plain.index("100.0") + 5 == auto.index("150.0") + 5 == head.index("tokens/s") + 8
    assert "near-ties" in auto
    assert "near-ties" not in plain


class FakeLLM:
    """Decodes every token in 0.01 s and every prompt in 0.05 s, by a clock of its own."""

    def __init__(self):
        self.now, self.asked = 0.0, []

    def generate(self, prompts, sampling, *, speculation, cache_salt):
        self.asked.append((len(prompts), sampling.max_tokens, speculation.mode))
        self.now += len(prompts) * (0.05 + 0.01 * sampling.max_tokens)
        stats = SimpleNamespace(rounds=sampling.max_tokens, drafted=0, accepted=0)
        return [SimpleNamespace(token_ids=(1,) * sampling.max_tokens, stats=stats) for _ in prompts]


@pytest.mark.parametrize(
    ("seconds", "batches", "tokens", "rounds", "left_out"),
    [
        (1000, [1, 8], 64, 3, []),
        (30, [1, 8], 42, 2, []),
        (14, [1, 8], 30, 1, []),
        (1, [1, 8], 12, 1, [8]),
    ],
)
def test_tokens_and_rounds_follow_from_the_time(seconds, batches, tokens, rounds, left_out, monkeypatch):
    llm = FakeLLM()
    monkeypatch.setattr(bench.time, "perf_counter", lambda: llm.now)
    budget = TimeBudget(seconds, lambda: llm.now)
    found = bench.BenchResults(Namespace(tokens=64, rounds=3, json=False))
    bench.measure(llm, {batch: [(1,)] * batch for batch in batches}, found, budget, Progress(io.StringIO()))
    assert (found.tokens, {row.rounds for row in found.rows()}, found.left_out) == (tokens, {rounds}, left_out)
    assert llm.now <= seconds or rounds == 1
    assert all(row.gain == pytest.approx(1.0) and row.same_tokens for row in found.rows())
    told = f"{tokens} tokens per output and {rounds} rounds; a larger --seconds allows more"
    assert (told in found.shown()) == (seconds < 1000)
