"""Recorded guesses are what the engine drafts, a replay costs what it should, and the page is written."""

from __future__ import annotations

import json
import sys
from itertools import pairwise

import numpy as np
import pytest

from benchmarks.harness.timing import way
from benchmarks.trees import __main__ as trees
from benchmarks.trees.drafters import HeadTrees, ModelTrees, texts
from benchmarks.trees.policies import (
    ConfidentChain,
    ConfidentTree,
    FixedChain,
    FixedTree,
    best_tree,
    rank_table,
)
from benchmarks.trees.prices import BATCHES, MOST_ROWS, StepPrices, curve, of_card
from benchmarks.trees.record import DEPTH, NODES, WIDTH, Guesses, lookups, record
from benchmarks.trees.replay import moves, replay
from engine.config import EngineConfig
from engine.params import SamplingParams
from engine.startup.build import build_engine
from engine.types import Request
from models import embedded_draft, embedded_eagle, embedded_target

TOKENS, K = 40, 4
TARGET_ROW, DRAFT_ROW = 10.0, 1.0


def guesses(ranks, **fields):
    """Guesses by the ranks of the text's tokens, `[S, up to DEPTH]`; beyond them nothing is right."""
    size = len(ranks)
    own = np.full((size, DEPTH), WIDTH)
    for row, known in zip(own, ranks, strict=True):
        row[: len(known)] = known
    defaults = {
        "chain": np.tile(0.5 ** np.arange(1, DEPTH + 1), (size, 1)),
        "chance": np.zeros((size, NODES)),
        "parent_chance": np.ones((size, NODES)),
        "depth": np.ones((size, NODES), np.int64),
        "right": np.zeros((size, NODES), bool),
        "found": np.zeros(size, np.int64),
        "found_right": np.zeros(size, np.int64),
    }
    return Guesses(own, **(defaults | fields))


@pytest.fixture(scope="module", params=[False, True], ids=["greedy", "sampled"])
def text(request):
    return texts(1, TOKENS, is_sampled=request.param)[0]


@pytest.mark.parametrize("name", ["model", "eagle"])
def test_a_replayed_chain_is_what_the_engine_does(text, name):
    drafter = ModelTrees(embedded_draft(), TOKENS) if name == "model" else HeadTrees(TOKENS)
    found = record(drafter, text)
    settings = {"target": str(embedded_target()), "draft": str(embedded_draft()), "eagle": str(embedded_eagle())}
    engine = build_engine(EngineConfig.model_validate({**settings, "dtype": "float32", "threads": 1}))
    sampling = SamplingParams(
        temperature=float(text.seed is not None), seed=text.seed, max_tokens=TOKENS, ignore_eos=True
    )
    prompt = text.tokens[: text.prompt_len]
    engine.add(Request(request_id="0", token_ids=prompt, sampling=sampling, speculation=way(K, name)))
    known = [len(prompt)]
    while engine.has_work:
        known += [known[-1] + len(event.token_ids) for event in engine.step().events if event.token_ids]
    [places] = moves(FixedChain(K), [found])
    steps = [(before, after - before) for before, after in pairwise(known[1:]) if before in text.starts]
    assert len(steps) > 3
    assert [places[before - text.starts.start][1] for before, _ in steps] == [made for _, made in steps]
    assert any(made > 1 for _, made in steps)


def test_a_tree_of_one_child_is_the_chain(text):
    """The likeliest node first: a tree holds the first guess, and its right nodes lie on one path of right guesses."""
    found = record(ModelTrees(embedded_draft(), TOKENS), text)
    assert (found.depth[:, 0] == 1).all()
    assert (found.right[:, 0] == (found.ranks[:, 0] == 0)).all()
    assert np.allclose(found.chance[:, 0], found.chain[:, 0])
    assert (np.diff(found.chance) <= 1e-12).all()
    for depth in range(1, DEPTH + 1):
        right = (found.right & (found.depth == depth)).sum(1)
        assert (right <= (found.ranks[:, :depth] < WIDTH).all(1)).all()
    assert sum(made for made, _ in lookups(text)) == found.found.sum()
    assert (found.found_right <= found.found).all()


def test_what_policies_draft_and_keep():
    known = guesses([[0, 0, 1], [1, 0], [2]])
    assert FixedChain(2).plans(known).gained.tolist() == [2, 0, 0]
    tree = FixedTree(frozenset({(0,), (1,), (0, 0), (1, 0)}))
    plans = tree.plans(known)
    assert plans.gained.tolist() == [2, 2, 0]
    assert plans.drafts.tolist() == [4, 4, 4]
    assert plans.rows[0].tolist() == [1, 2] + [0] * (DEPTH - 2)
    chain = ConfidentChain(0.2, 0.4).plans(known)
    assert chain.drafts.tolist() == [2, 2, 2], "0.5 and 0.25, of which 0.5 is fed"
    assert chain.rows[0].sum() == 2
    shape = {"chance": np.array([[0.6, 0.3, 0.25] + [0.0] * (NODES - 3)]), "depth": np.array([[1, 2, 1] + [3] * 29])}
    right = np.array([[True, True] + [False] * (NODES - 2)])
    grown = ConfidentTree(0.2, 0.5, 16).plans(guesses([[0, 0]], right=right, **shape))
    assert (grown.drafts.tolist(), grown.gained.tolist()) == ([3], [2])
    assert grown.rows[0].tolist() == [1, 1] + [0] * (DEPTH - 2)
    looked_up = guesses([[0, 0]], found=np.array([5]), found_right=np.array([4]))
    plans = FixedChain(2).plans(looked_up).after_lookup(looked_up)
    assert (plans.drafts.tolist(), plans.gained.tolist(), plans.rows.sum()) == ([5], [4], 0)


def test_the_best_tree_has_the_likeliest_paths():
    known = guesses([[0] * DEPTH] * 60 + [[1] * DEPTH] * 30 + [[3]] * 10)
    assert rank_table([known])[0, [0, 1, 3]] == pytest.approx([0.6, 0.3, 0.1])
    assert best_tree([known], 3, DEPTH).paths == {(0,), (0, 0), (0, 0, 0)}
    assert best_tree([known], 3, 1).paths == {(0,), (1,), (3,)}
    assert (1,) in best_tree([known], NODES, DEPTH).paths


def test_a_replay_costs_its_rows():
    target, draft = curve({1: TARGET_ROW, 2: 2 * TARGET_ROW}), curve({1: DRAFT_ROW, 2: 2 * DRAFT_ROW})
    prices = StepPrices("", dict.fromkeys(BATCHES, target), {"model": dict.fromkeys(BATCHES, draft)})
    known = guesses([[0, 0], [0], [0], [9]])  # two drafts are kept at the first place; the next step is at the last
    alone = replay(moves(FixedChain(2), [known]), prices, "model", 1)
    assert (alone.tokens, alone.steps) == (4, 2)
    assert alone.seconds == pytest.approx(2 * (3 * TARGET_ROW + 2 * DRAFT_ROW))
    both = replay(moves(FixedChain(2), [known, known]), prices, "model", 2)
    assert both.length == alone.length
    assert both.seconds == pytest.approx(4 * (6 * TARGET_ROW + 2 * 2 * DRAFT_ROW))
    assert len(of_card().target[1]) == MOST_ROWS + 1


def test_the_page_is_written(tmp_path, monkeypatch):
    options = ["--prompts", "2", "--tokens", str(DEPTH + 4), "--rounds", "1", "--shapes", "tiny", "tinier"]
    monkeypatch.setattr(sys, "argv", ["trees", "--out", str(tmp_path / "trees"), *options])
    trees.main()
    report, page = json.loads((tmp_path / "trees.json").read_text()), (tmp_path / "trees.md").read_text()
    assert len(report["speeds"]) == 2 * 2 * 2 * 3 * len(BATCHES)
    assert all(row[kind] > 0 for row in report["speeds"] for kind in ("fixed_chain", "any_chain", "any_tree"))
    assert all(f"## {title}" in page for title in ("Acceptance by rank", "Prices", "Speed"))
    by_nodes = {row["nodes"]: row["chain"] for row in report["lengths"]}
    assert by_nodes[1] is not None
    assert by_nodes[NODES] is None
