"""What a pass costs by its rows: measured on this machine, or reckoned for a card."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from transformers import LlamaConfig

from benchmarks.harness.synthetic import SHAPES
from benchmarks.harness.timing import Batch, abreast, way
from benchmarks.steps import CONTEXT, random_model
from benchmarks.trees.record import NODES, Floats, TreeDrafter
from engine.attention import choose
from engine.config import EngineConfig
from engine.kv.arena import KVArena
from engine.kv.batch import Feed
from engine.model.fusion.fuse import fuse
from engine.model.fusion.stack import stack
from engine.model.linear.packed import pack
from engine.model.runner import ModelRunner, kv_layout
from engine.startup.build import build_engine
from models import embedded_draft, embedded_eagle, embedded_target

BATCHES = (1, 2, 4)
MOST_ROWS = max(BATCHES) * (NODES + 1)
DRAFTERS = ("model", "eagle")
_POINTS = (1, 2, 4, 8, 16, 32, 64)  # rows of a pass that is measured
_DRAFTS = 4
_PASSES = 5  # of each number of rows in a round


@dataclass(frozen=True)
class StepPrices:
    """Seconds of passes: entry r of an array is a pass of r rows, 0 to `MOST_ROWS`."""

    name: str
    target: Mapping[int, Floats]  # by sequences of the batch
    draft: Mapping[str, Mapping[int, Floats]]  # by drafter, and sequences of the batch


def curve(points: Mapping[int, float]) -> Floats:
    """Return seconds by rows from seconds at some: straight lines between them and on beyond them, never falling."""
    rows = sorted(points)
    known = np.maximum.accumulate([points[r] for r in rows])
    wanted = np.arange(MOST_ROWS + 1)
    slope = (known[-1] - known[-2]) / (rows[-1] - rows[-2])
    made: Floats = np.interp(wanted, rows, known) + slope * (wanted - rows[-1]).clip(min=0)
    made[0] = 0.0
    return made


def of_embedded(
    drafters: Mapping[str, TreeDrafter], prompts: Sequence[tuple[int, ...]], tokens: int, rounds: int
) -> StepPrices:
    """Measure the embedded pair in float32, in processor time of one thread.

    Prices of one row for each sequence are the engine's own: a step without drafts, and a fourth of what a step with
    four drafts takes longer than its target's pass explains. Further rows cost what they add to a pass alone.
    """
    settings = {
        "target": str(embedded_target()), "draft": str(embedded_draft()), "eagle": str(embedded_eagle()),
        "dtype": "float32", "threads": 1, "max_batch_size": max(BATCHES), "warm_up_seconds": 0.0,
    }  # fmt: skip
    engine = build_engine(EngineConfig.model_validate(settings))
    steps: dict[tuple[str, int], float] = defaultdict(lambda: math.inf)
    for _, batch, name in product(range(rounds), BATCHES, ("none", *DRAFTERS)):
        asked = [prompts[i % len(prompts)] for i in range(batch)]
        drafts = way(0) if name == "none" else way(_DRAFTS, name)
        turn = abreast({name: Batch(engine, asked, tokens, drafts, clock=time.process_time)})[name]
        steps[name, batch] = min(steps[name, batch], turn.decode_seconds / len(turn.verify_seconds))
    alone = {name: _alone(drafter, prompts[0], rounds) for name, drafter in drafters.items()}
    target = {b: _raised(alone["target"], b, steps["none", b]) for b in BATCHES}
    drafting = {(n, b): (steps[n, b] - target[b][b * (_DRAFTS + 1)]) / _DRAFTS for n in DRAFTERS for b in BATCHES}
    passes = {name: {b: _raised(alone[name], b, drafting[name, b]) for b in BATCHES} for name in DRAFTERS}
    return StepPrices("embedded pair, float32", target, passes)


def _alone(drafter: TreeDrafter, text: Sequence[int], rounds: int) -> Floats:
    """Return the price of a model's own passes after a text."""
    _, hidden = drafter.read(text)
    start = len(text) - drafter.lag

    def run(rows: int) -> object:
        feed = Feed([text[-1]] * rows, start, range(start + rows), rows)
        return drafter.grow([feed], hidden[-1:].expand(rows, -1))

    return _by_rows(run, rounds)


def _by_rows(run: Callable[[int], object], rounds: int) -> Floats:
    """Return the least processor time of one thread, of some passes in each round, by rows."""
    least = dict.fromkeys(_POINTS, math.inf)
    for rows in _POINTS:
        run(rows)
    for _, rows, _ in product(range(rounds), _POINTS, range(_PASSES)):
        start = time.process_time()
        run(rows)
        least[rows] = min(least[rows], time.process_time() - start)
    return curve(least)


def _raised(passes: Floats, rows: int, price: float) -> Floats:
    """Return these prices with a constant added (or taken away), so that a pass of `rows` costs `price`."""
    made: Floats = np.maximum(passes - passes[rows] + price, 0.0)
    made[0] = 0.0
    return made


def of_shapes(target_shape: str, draft_shape: str, rounds: int) -> StepPrices:
    """Measure single passes of random weights in int8, one thread. The head is one layer of the target's shape."""
    one_layer = SHAPES[target_shape] | {"num_hidden_layers": 1}
    curves = [_price_of_shape(shape, rounds) for shape in (SHAPES[target_shape], SHAPES[draft_shape], one_layer)]
    target, *drafts = (dict.fromkeys(BATCHES, own) for own in curves)
    name = f"{target_shape} with a draft of {draft_shape}, int8"
    return StepPrices(name, target, dict(zip(DRAFTERS, drafts, strict=True)))


def _price_of_shape(shape: Mapping[str, int], rounds: int) -> Floats:
    model = random_model(LlamaConfig.from_dict(dict(shape)), torch.float32, weights="int8")
    for prepare in (fuse, pack, stack):
        prepare(model)
    arena = KVArena(kv_layout(model.config, model.dtype), 2 * CONTEXT, 1, model.device)
    runner = ModelRunner(model, arena, choose("auto", model.device))
    return _by_rows(lambda rows: runner.forward([Feed([5] * rows, CONTEXT, range(CONTEXT + rows), rows)]), rounds)


@dataclass(frozen=True)
class CardModel:
    """Bytes that a pass reads in any case, and operations per row."""

    parameters: float  # that are multiplied, bfloat16
    kv_bytes: float = 0.0  # per sequence, at the context of the reckoning

    def seconds(self, rows: int, batch: int) -> float:
        """Return the time of a pass on an H100: the longer of reading and multiplying, and a launch."""
        reading = (2 * self.parameters + batch * self.kv_bytes) / (_BANDWIDTH * _REACHED)
        return max(reading, 2 * self.parameters * rows / (_OPERATIONS * _REACHED)) + _LAUNCH


# An H100 SXM5 by its data sheet; kernels reach about 0.8 of either. A launch is that of a graph.
_BANDWIDTH, _OPERATIONS, _REACHED, _LAUNCH = 3.35e12, 989e12, 0.8, 10e-6
# Llama 3.1 8B; Llama 3.2 1B; one layer of the 8B, the matrix before it and the output matrix, as in EAGLE. 2,048
# tokens of context: 128 KiB, 32 KiB and 4 KiB each.
_TARGET = CardModel(7.5e9, 2048 * 128 * 1024)
_CARD_DRAFTS = {
    "model": CardModel(1.24e9, 2048 * 32 * 1024),
    "eagle": CardModel(0.218e9 + 0.034e9 + 0.525e9, 2048 * 4096),
}


def of_card() -> StepPrices:
    """Reckon an 8B target in bfloat16 on an H100 by its roofline; attention to a tree costs nothing besides."""
    drafts = {name: _reckoned(model) for name, model in _CARD_DRAFTS.items()}
    return StepPrices("8B on an H100, bfloat16, by arithmetic", _reckoned(_TARGET), drafts)


def _reckoned(model: CardModel) -> Mapping[int, Floats]:
    return {b: np.array([0.0, *(model.seconds(r, b) for r in range(1, MOST_ROWS + 1))]) for b in BATCHES}
