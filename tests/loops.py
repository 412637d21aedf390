"""Engines of tiny models whose sequences decode in rounds on the device, and requests for them."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, lru_cache
from itertools import cycle

import torch

from benchmarks.harness.bare import options as bare_options
from pilotfish.engine.attention import paged
from pilotfish.engine.control.controller import Control
from pilotfish.engine.device_loop.graph_cache import RoundShape, covering
from pilotfish.engine.device_loop.layout import DeviceModel
from pilotfish.engine.device_loop.loop import RoundLoop
from pilotfish.engine.device_loop.round import RoundOps
from pilotfish.engine.engine import Engine
from pilotfish.engine.kernels import reference
from pilotfish.engine.kv.arena import KVArena
from pilotfish.engine.model.decoder.ops import LayerOps
from pilotfish.engine.model.runner import layout_of_model
from pilotfish.engine.params import SamplingParams, SpeculationMode, SpeculationParams
from pilotfish.engine.startup.build import assemble
from pilotfish.engine.types import FinishReason, Request, Sequence
from tests import fakes, zoo

PLAIN = RoundOps(paged.attend_plainly, reference.commit)
LONGEST, PAGE = 64, 16
LAWS = (
    SamplingParams(),
    SamplingParams(temperature=0.8, top_p=0.9),
    SamplingParams(temperature=1.3, top_k=20, min_p=0.02),
    SamplingParams(temperature=1.0),
)


@lru_cache
def models(family: str = "llama"):
    """A target, and a draft that is often right."""
    return zoo.ours(zoo.reference(family)), zoo.near(zoo.reference(family))


def gib(pages: int, pair, page_size: int) -> float:
    """Memory of so many pages in both arenas."""
    return (pages * page_size * sum(layout_of_model(m).bytes_per_token for m in pair) + 1) / 2**30


def engine_of(family: str = "llama", pages: int = 40, pair=None, **options) -> Engine:
    pair = pair or models(family)
    page_size = options.get("page_size", PAGE)
    usual = {
        "target": family, "draft": "near", "loop": "rounds", "attention": "reference", "speculation": "fixed",
        "max_model_len": LONGEST, "page_size": page_size, "kv_memory": gib(pages, pair, page_size),
        "max_batch_size": 6, "max_batch_tokens": 32, "num_draft_tokens": 4, "warm_up_seconds": 0,
        "max_step_ms": 1e9,  # how fast this machine is decides in no test how much a step reads
    }  # fmt: skip
    return assemble(bare_options(**usual | options), *pair)


@lru_cache
def _fused(family: str):
    return tuple(map(zoo.on_kernels, models(family)))


def on_the_card(family: str = "llama"):
    """Copies of both models on the card of `tests.card.here`, with its kernels wherever they fit."""
    ops, pair = LayerOps.kernels(), copy.deepcopy(_fused(family))
    for module in (module for model in pair for module in model.modules() if hasattr(module, "ops")):
        module.ops = ops
    return tuple(model.cuda() for model in pair)


def recorded(family: str = "llama", shapes: Iterable[RoundShape] | None = None, **options) -> Engine:
    """An engine on the card, with rounds that are recorded: by default those that can stand in for all others."""
    usual = {"device": "cuda", "attention": "auto", "pair": options.pop("pair", None) or on_the_card(family)}
    engine = engine_of(family, **usual | options)
    engine.rounds.graphs.record(covering(6, 4) if shapes is None else shapes)
    return engine


def steered(control, make=engine_of, **options) -> Engine:
    """An engine with somebody else to choose K, of the rounds and of the plain steps beside them."""
    engine = make(**options)
    engine.scheduler.round_control = engine.scheduler.control = engine.control = control
    return engine


def fed(model, num_pages: int) -> DeviceModel:
    """A model with an arena of so many pages and one behind them."""
    arena = KVArena(layout_of_model(model), num_pages, PAGE, model.device, spare_rows=PAGE)
    return DeviceModel(model, arena, model.config.max_position_embeddings)


def loop_of(pair, ops: RoundOps = PLAIN, num_pages: int = 40, **options) -> RoundLoop:
    """The loop alone, for those who look at a single round."""
    sizes = {"num_slots": 4, "longest": LONGEST, "most_drafts": 4, "vocab": zoo.VOCAB}
    two = tuple(fed(model, num_pages) for model in pair)
    return RoundLoop(*two, ops, **sizes, drafts_for=frozenset(("model",)), **options)


def request(i: int, **changes) -> Request:
    """Different lengths, laws and seeds; every third may end early. `changes` are of its sampling."""
    rng = random.Random(i)
    prompt = tuple(rng.randrange(3, zoo.VOCAB) for _ in range(rng.choice([1, 2, 5, 17, 33])))
    law = LAWS[i % len(LAWS)]
    stops = (rng.randrange(zoo.VOCAB), rng.randrange(zoo.VOCAB)) if i % 3 == 0 else ()
    wanted = {"max_tokens": rng.randint(1, 30), "stop_token_ids": stops, "ignore_eos": True, "seed": 2**64 - 1 - i}
    shape = {name: getattr(law, name) for name in ("temperature", "top_p", "top_k", "min_p")}
    return Request(request_id=str(i), token_ids=prompt, sampling=SamplingParams(**shape | wanted | changes))


def asking(asked: Request, **wishes) -> Request:
    """The same with wishes about speculation."""
    return replace(asked, speculation=SpeculationParams(**wishes))


@cache
def plainly(asked: Request, family: str = "llama"):
    """What one-token decoding gives a request that is alone: its tokens, and why it ended."""
    said = fakes.run(_plain_engine(family), [asking(asked, mode=SpeculationMode.OFF)])
    return said.tokens[asked.request_id], said.finished[asked.request_id].reason


@cache
def _plain_engine(family: str) -> Engine:
    return engine_of(family, loop="plain", draft=None, proposer="none", prefix_cache=False)


class AnyK(Control):
    """Any number of drafts in any step, and often none."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self._random = random.Random(seed)

    def choose(self, sequences: Seq[Sequence], limits: Seq[int], budget: int, prompt_rows: int) -> list[int]:
        if self._random.random() < 0.3:
            return [0] * len(sequences)
        return [self._random.choice([0, self._random.randint(0, limit)]) for limit in limits]


class Scripted(Control):
    """These Ks, one after another."""

    def __init__(self, ks: Iterable[int]) -> None:
        super().__init__()
        self._ks = iter(ks)

    def choose(self, sequences, limits, budget, prompt_rows):
        if not sequences:
            return []
        k = next(self._ks)
        return [min(k, limit) for limit in limits]


@contextmanager
def no_wait() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def steps_without_waiting(engine, ks):
    """An admission is a prompt's pass, which the host waits for: the steps around it are not."""
    engine.scheduler.round_control = engine.round_control = Scripted(cycle(ks))
    for i in (2, 5, 9):
        engine.add(request(i, max_tokens=30))
    settle(engine)
    steady(engine, 2)
    engine.finish("2", FinishReason.ABORTED)  # a slot is free, and the batch is laid out anew
    steady(engine, 2)
    engine.add(request(11, max_tokens=30))
    settle(engine)
    ended = []
    while engine.has_work:  # one after the other, until nobody is left
        ended += steady(engine, 1)
    assert "11" in ended
    assert not engine.rounds.graphs.unrecorded


def settle(engine):
    """Until all ride, and the newest one's first round is on its way."""
    engine.step()
    while len(engine.rounds.on_device) < engine.load.num_running or engine.load.num_waiting:
        engine.step()
    engine.step()


def steady(engine, steps):
    """Steps in which the host may not wait; who ended in them."""
    events = []
    with no_wait():
        for _ in range(steps):
            events += engine.step().events
    return [event.request_id for event in events if event.finished is not None]
