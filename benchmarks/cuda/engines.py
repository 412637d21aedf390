"""Engines with random weights on a GPU at a chosen acceptance, and the time of their steps.

Random models never agree, so the accepted drafts are drawn at random on the device. All computation runs as usual.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter
from typing import cast

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from benchmarks.cuda.arenas import PAGE
from benchmarks.cuda.card import Card, wait
from benchmarks.cuda.shapes import SHAPES
from benchmarks.harness.bare import options
from pilotfish.engine.device_loop.graph_cache import places_for
from pilotfish.engine.device_loop.loop import RoundLoop
from pilotfish.engine.device_loop.round import RoundOps
from pilotfish.engine.engine import Engine
from pilotfish.engine.kernels import reference
from pilotfish.engine.kernels.args import Committed, Tracks
from pilotfish.engine.model.decoder.decoder import DecoderModel
from pilotfish.engine.model.decoder.families.table import architecture_for
from pilotfish.engine.model.decoder.load import prepared
from pilotfish.engine.model.decoder.ops import LayerOps
from pilotfish.engine.model.decoder.weights import WeightReader
from pilotfish.engine.model.fallback import kv_layout
from pilotfish.engine.model.runner import layout_of_model
from pilotfish.engine.params import SamplingParams, SpeculationMode, SpeculationParams
from pilotfish.engine.sampling import noise
from pilotfish.engine.sampling.noise import Stream
from pilotfish.engine.startup.build import assemble
from pilotfish.engine.startup.device_loop import ops_on
from pilotfish.engine.stats import StepStats
from pilotfish.engine.types import FinishReason, Request

CHUNK = 8192  # prompt tokens that a step feeds

_WARM = 6  # warm-up steps before the timed ones
_HOST = 8  # steps that measure the time of Python
_FEW = 16  # prompt tokens during preparation, which only needs the right batch sizes


@dataclass(frozen=True, slots=True)
class RandomPair:
    """Two models with random weights, or only the target."""

    target: PreTrainedModel
    draft: PreTrainedModel | None

    @classmethod
    def of(cls, card: Card, target: str, draft: str | None, attention: str | None = None) -> RandomPair:
        """Create the models on the device by names of `SHAPES`: our decoders, or transformers' with this attention."""
        made = [_random_model(LlamaConfig(**SHAPES[name]), card, attention) for name in (target, draft) if name]
        return cls(made[0], made[1] if draft else None)

    @property
    def models(self) -> list[PreTrainedModel]:
        """Return the target, and the draft if there is one."""
        return [model for model in (self.target, self.draft) if model is not None]


def on_kernels(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights in our decoder, as a server on a GPU has them."""
    architecture = architecture_for(model.config)
    assert architecture is not None, "shapes are Llama's"
    read = WeightReader(prepared(model.state_dict(), architecture), model.dtype, device=model.device, packs=False)
    made = DecoderModel(architecture, model.config, read).eval()
    made.use(LayerOps.kernels() if model.device.type == "cuda" else LayerOps.of(reference))
    return cast("PreTrainedModel", made)


def _random_model(config: LlamaConfig, card: Card, attention: str | None) -> PreTrainedModel:
    """Return a model with random bf16 weights, created directly on the device."""
    with card.device:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, attn_implementation=attention or "eager", dtype=torch.bfloat16
        )
    return on_kernels(model) if attention is None else model.eval()


def pass_seconds(model: PreTrainedModel, card: Card, sequences: int, rows: int, context: int) -> float:
    """Return the minimum time of a pass: one read of its weights and K/V, or its operations if they take longer."""
    config = model.config
    numbers = sum(parameter.numel() for parameter in model.parameters())
    if not config.tie_word_embeddings:
        numbers -= config.vocab_size * config.hidden_size  # only a few rows of the embedding are read
    cached = sequences * context * kv_layout(config, torch.bfloat16).bytes_per_token
    return max((2 * numbers + cached) / card.bytes_per_second, 2 * numbers * sequences * rows / card.flops)


def round_limit(pair: RandomPair, card: Card, size: int, context: int, k: int) -> float:
    """Return the minimum time of a round: one draft pass of two rows, K - 1 of one row, and a verification."""
    drafting = 0.0
    for i in range(k):
        assert pair.draft is not None
        drafting += pass_seconds(pair.draft, card, size, 2 if i == 0 else 1, context)
    return drafting + pass_seconds(pair.target, card, size, k + 1, context)


def best_drafts(pair: RandomPair, card: Card, size: int, context: int, acceptance: float, most: int) -> int:
    """Return the K with the largest speed-up by the limits."""
    gains = {k: gain_limit(pair, card, size, context, acceptance, k) for k in range(1, most + 1)}
    return max(gains, key=lambda k: gains[k])


def gain_limit(pair: RandomPair, card: Card, size: int, context: int, acceptance: float, k: int) -> float:
    """Return the maximum speed-up of K drafts over plain decoding."""
    plain = round_limit(pair, card, size, context, 0)
    return expected_tokens(acceptance, k) * plain / round_limit(pair, card, size, context, k)


def expected_tokens(acceptance: float, k: int) -> float:
    """Return the expected tokens of a round in which each draft is accepted with this probability."""
    return sum(acceptance**i for i in range(k + 1))


def kept_at(acceptance: float, commit: Callable[..., Committed]) -> Callable[..., Committed]:
    """Return a commit that accepts each draft with this probability, drawn by slot and position."""

    def synthetic(drawn: Tensor, drafts: Tensor, num_sound: Tensor, slots: Tensor, tracks: Tracks) -> Committed:
        place = tracks.length[slots][:, None] + torch.arange(drafts.shape[1], device=drafts.device)
        chance = noise.uniform(slots[:, None].expand_as(place), place, Stream.ACCEPT)
        is_kept = (chance < acceptance) & (drafts >= 0)
        return commit(drawn, torch.where(is_kept, drawn[:, :-1], -1), num_sound, slots, tracks)

    return synthetic


def engine_of(
    pair: RandomPair,
    card: Card,
    size: int,
    longest: int,
    acceptance: float = 0.0,
    most_drafts: int = 0,
    page: int = PAGE,
    loop: str = "rounds",
) -> Engine:
    """Return an engine for up to `size` sequences, by default all of them device-resident."""
    real = ops_on(card.device)
    ops = RoundOps(real.attend, kept_at(acceptance, real.commit))
    pages = size * -(-longest // page)
    bytes_each = sum(layout_of_model(model).bytes_per_token for model in pair.models)
    config = options(
        "random", draft=("random",) if pair.draft else (), proposer="model" if pair.draft else "none",
        device=card.device.type, dtype="bfloat16", loop=loop, num_draft_tokens=most_drafts, max_batch_size=size,
        max_batch_tokens=max(CHUNK, size), max_model_len=longest, page_size=page, prefix_cache=False,
        kv_memory=(pages * page * bytes_each + 1) / 2**30,
    )  # fmt: skip
    return assemble(config, pair.target, pair.draft, ops=ops)


def positions_needed(context: int, size: int, steps: int, k: int) -> int:
    """Return positions for a prompt and K + 1 tokens per step; the first sequences decode while others are fed."""
    feeding = -(-size * context // CHUNK)
    return context + (feeding + _WARM + steps + _HOST + 2) * (k + 1)


@dataclass(frozen=True, slots=True)
class Measured:
    """Times of the steps of one setting."""

    seconds: float  # per step
    tokens: float  # per step and sequence
    device_seconds: float  # per step, on the device's own clock
    host_seconds: float  # Python time per step, without waits
    longest: float  # of the longest step, relative to the median step

    @property
    def shown(self) -> float:
        """Return seconds per step in which the device was idle and waited for the host."""
        return max(0.0, self.seconds - self.device_seconds)


def record(engine: Engine, size: int, k: int | None = None) -> None:
    """Record rounds of `size` sequences with `k` drafts each, or with every number of drafts (None)."""
    if isinstance(engine.rounds, RoundLoop):
        wanted = (s for s in engine.rounds.shapes if s.size == places_for(size) and k in (None, s.k))
        engine.rounds.graphs.record(wanted)


def fill(engine: Engine, size: int, context: int, k: int | None) -> None:
    """Add `size` sequences with prompts of `context` tokens and feed them, with K drafts each or AUTO (None)."""
    if k is None:
        asked = SpeculationParams(mode=SpeculationMode.AUTO)
    else:
        asked = SpeculationParams(mode=SpeculationMode.FIXED if k else SpeculationMode.OFF, num_draft_tokens=k)
    record(engine, size, k)
    for i in range(size):
        prompt = tuple(torch.randint(engine.facts.limits.vocab_size, (context,)).tolist())
        most = engine.facts.limits.max_model_len - context
        sampling = SamplingParams(temperature=1.0, seed=i, max_tokens=most, ignore_eos=True)
        engine.add(Request(request_id=str(i), token_ids=prompt, sampling=sampling, speculation=asked))
    waiting = True
    while waiting:
        waiting = bool(_step(engine).prompt_tokens) or bool(engine.load.num_waiting)


def warm_up_rounds(engine: Engine, size: int, most_drafts: int) -> None:
    """Run rounds of this size with each K, so that all graphs are recorded and AUTO learns no recording times."""
    for k in range(most_drafts + 1):
        fill(engine, size, _FEW, k)
        for _ in range(_WARM):
            engine.step()
        empty(engine)


def measure(engine: Engine, card: Card, size: int, steps: int, warm_up: int = _WARM) -> Measured:
    """Time decoding steps; every sequence in the engine must have enough tokens left for them."""
    loop = engine.rounds.name
    for _ in range(warm_up):
        engine.step()
    stats, each = timed(engine, card, steps)
    made, device = sum(s.generated_tokens for s in stats), sum(s.device_seconds for s in stats)
    assert engine.load.num_running == size, "some ended on the way"
    assert engine.rounds.name == loop, "a round failed, and the rest were plain steps: the log says why"
    longest = max(each) / statistics.median(each)
    return Measured(sum(each) / steps, made / steps / size, device / steps, _host_seconds(engine, card), longest)


def _step(engine: Engine) -> StepStats:
    stats = engine.step().stats
    assert stats is not None, "it is the output of a step"
    return stats


def timed(engine: Engine, card: Card, steps: int) -> tuple[list[StepStats], list[float]]:
    """Return the statistics and seconds of each step. Between the steps, nothing else waits for the device."""
    wait(card.device)
    stats, timer = list[StepStats](), [perf_counter()]
    for _ in range(steps):
        stats.append(_step(engine))
        timer.append(perf_counter())
    wait(card.device)
    timer[-1] = perf_counter()
    return stats, [after - before for before, after in pairwise(timer)]


def _host_seconds(engine: Engine, card: Card) -> float:
    """Return the minimum time of a step in Python when the device is idle."""
    found = []
    for _ in range(_HOST):
        wait(card.device)
        start = perf_counter()
        engine.step()
        found.append(perf_counter() - start)
    return min(found)


def empty(engine: Engine) -> None:
    """Abort all sequences."""
    engine.finish_all(FinishReason.ABORTED)


def settled(
    engine: Engine, card: Card, size: int, context: int, k: int | None, steps: int, warm_up: int = _WARM
) -> Measured:
    """Fill the engine with `size` sequences, measure decoding steps, and empty it."""
    fill(engine, size, context, k)
    got = measure(engine, card, size, steps, warm_up)
    empty(engine)
    return got
