"""The time in which the target reads one prompt, relative to its operations at the rate of a large matmul."""

from __future__ import annotations

import statistics
from time import perf_counter

import torch

from benchmarks.cuda.card import Card, wait
from benchmarks.cuda.engines import RandomPair, engine_of, pass_seconds, positions_needed
from benchmarks.cuda.report import PartReport
from benchmarks.cuda.setting import Setting
from benchmarks.cuda.shapes import SHAPES, Heads
from pilotfish.engine.engine import Engine
from pilotfish.engine.params import SamplingParams
from pilotfish.engine.types import Request

_TIMES = 3  # after one warm-up run


def measure(setting: Setting, section: PartReport) -> None:
    """Measure from adding a request to its first token: the whole engine, with its own prompt chunks."""
    card, longest = Card.measured(setting.device), max(setting.prompts)
    pair = RandomPair.of(card, setting.target, None)
    engine = engine_of(pair, card, 1, positions_needed(longest, 1, 0, 0))
    section.table("prompt", "ms", "tok/s", "limit, ms", "of limit")
    for length in setting.prompts:
        found = []
        for _ in range(_TIMES + 1):
            wait(card.device)
            start = perf_counter()
            _read(engine, length)
            wait(card.device)
            found.append(perf_counter() - start)
        seconds = statistics.median(found[1:])
        limit = pass_seconds(pair.target, card, 1, length, length) + attention_seconds(setting.target, card, length)
        cells = f"{seconds * 1e3:.1f}", f"{length / seconds:.0f}", f"{limit * 1e3:.1f}", f"{limit / seconds:.0%}"
        section.row(length, *cells)
        section.number(str(length), seconds=seconds, of_limit=limit / seconds)


def _read(engine: Engine, length: int) -> None:
    """Run one prompt and the token of its last pass."""
    prompt = tuple(torch.randint(engine.facts.limits.vocab_size, (length,)).tolist())
    sampling = SamplingParams(temperature=1.0, seed=0, max_tokens=1, ignore_eos=True)
    engine.add(Request(request_id="prompt", token_ids=prompt, sampling=sampling))
    while engine.has_work:
        engine.step()


def attention_seconds(shape: str, card: Card, length: int) -> float:
    """Return the time of two matmuls over half of the square of positions, in all heads of all layers."""
    heads = Heads.of(shape)
    layers: int = SHAPES[shape]["num_hidden_layers"]
    return 2 * layers * heads.heads * heads.dim * length**2 / card.flops
