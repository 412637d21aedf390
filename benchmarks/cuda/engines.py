"""Engines of random weights on a GPU, at an acceptance that was chosen, and what their steps take.

Random models never agree, so which drafts are kept is drawn on the device, while all is computed as if it counted.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from benchmarks.cuda.arenas import PAGE
from benchmarks.cuda.card import Card, wait
from benchmarks.cuda.shapes import SHAPES
from benchmarks.harness.bare import options
from engine.attention.registry import ATTENTION_NAME
from engine.device_loop.round import RoundOps
from engine.device_loop.shapes import places_for
from engine.engine import Engine
from engine.kernels.args import Committed, Tracks
from engine.model.fusion.fuse_cuda import fuse_for_cuda
from engine.model.runner import kv_layout, prepare
from engine.params import SamplingParams, SpeculationMode, SpeculationParams
from engine.sampling import noise
from engine.sampling.noise import Stream
from engine.startup.build import assemble
from engine.startup.loop import ops_on
from engine.stats import StepStats
from engine.types import FinishReason, Request

CHUNK = 8192  # tokens of prompts that a step feeds

_WARM = 6  # steps before any are timed
_HOST = 8  # steps that find out what Python takes
_FEW = 16  # tokens of the prompts of practice, which only makes shapes known


@dataclass(frozen=True, slots=True)
class RandomPair:
    """Two models with random weights, or the target alone."""

    target: PreTrainedModel
    draft: PreTrainedModel | None

    @classmethod
    def of(cls, card: Card, target: str, draft: str | None, attention: str = ATTENTION_NAME) -> RandomPair:
        """Made on the device, by names of `SHAPES`; with our attention they are fused for it."""
        made = [_random_model(LlamaConfig(**SHAPES[name]), card, attention) for name in (target, draft) if name]
        return cls(made[0], made[1] if draft else None)

    @property
    def models(self) -> list[PreTrainedModel]:
        """Those that there are."""
        return [model for model in (self.target, self.draft) if model is not None]


def _random_model(config: LlamaConfig, card: Card, attention: str) -> PreTrainedModel:
    """Random bf16 weights, drawn where they stay."""
    prepare(config)
    with card.device:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, attn_implementation=attention, dtype=torch.bfloat16
        )
    if card.is_cuda and attention == ATTENTION_NAME:
        fuse_for_cuda(model)
    model.eval()
    return model


def pass_seconds(model: PreTrainedModel, card: Card, sequences: int, rows: int, context: int) -> float:
    """The least that a pass can take: its weights and K/V read once, or its operations."""
    config = model.config
    numbers = sum(parameter.numel() for parameter in model.parameters())
    if not config.tie_word_embeddings:
        numbers -= config.vocab_size * config.hidden_size  # rows are picked from it, it is not read
    cached = sequences * context * kv_layout(config, torch.bfloat16).bytes_per_token
    return max((2 * numbers + cached) / card.bytes_per_second, 2 * numbers * sequences * rows / card.flops)


def round_limit(pair: RandomPair, card: Card, size: int, context: int, k: int) -> float:
    """The least that a round can take: a draft pass of two rows, K - 1 of one, a verification."""
    drafting = 0.0
    for i in range(k):
        assert pair.draft is not None
        drafting += pass_seconds(pair.draft, card, size, 2 if i == 0 else 1, context)
    return drafting + pass_seconds(pair.target, card, size, k + 1, context)


def best_drafts(pair: RandomPair, card: Card, size: int, context: int, acceptance: float, most: int) -> int:
    """The K by which limits allow the largest speed-up."""
    gains = {k: gain_limit(pair, card, size, context, acceptance, k) for k in range(1, most + 1)}
    return max(gains, key=lambda k: gains[k])


def gain_limit(pair: RandomPair, card: Card, size: int, context: int, acceptance: float, k: int) -> float:
    """The speed-up over plain decoding that K drafts could have at most."""
    plain = round_limit(pair, card, size, context, 0)
    return expected_tokens(acceptance, k) * plain / round_limit(pair, card, size, context, k)


def expected_tokens(acceptance: float, k: int) -> float:
    """Tokens of a round in which each draft is kept with this probability, until one is not."""
    return sum(acceptance**i for i in range(k + 1))


def kept_at(acceptance: float, commit: Callable[..., Committed]) -> Callable[..., Committed]:
    """A commit that keeps each draft with this probability, whatever it was: by a number of its slot and position."""

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
) -> Engine:
    """An engine for up to `size` sequences, all of them in rounds on the device."""
    real = ops_on(card.device)
    ops = RoundOps(real.attend, real.choose, kept_at(acceptance, real.commit))
    pages = size * -(-longest // page)
    bytes_each = sum(kv_layout(model.config, torch.bfloat16).bytes_per_token for model in pair.models)
    config = options(
        "random", draft="random" if pair.draft else None, proposer="model" if pair.draft else "none",
        device=card.device.type, dtype="bfloat16", loop="rounds", num_draft_tokens=most_drafts, max_batch_size=size,
        max_batch_tokens=max(CHUNK, size), max_model_len=longest, page_size=page, prefix_cache=False,
        kv_memory=(pages * page * bytes_each + 1) / 2**30,
    )  # fmt: skip
    return assemble(config, pair.target, pair.draft, ops=ops)


def room_for(context: int, size: int, steps: int, k: int) -> int:
    """Positions for a prompt and K + 1 tokens in each step; the first to come ride while others are still fed."""
    feeding = -(-size * context // CHUNK)
    return context + (feeding + _WARM + steps + _HOST + 2) * (k + 1)


@dataclass(frozen=True, slots=True)
class Measured:
    """What steps of one setting took."""

    seconds: float  # per step
    tokens: float  # per step and sequence
    device_seconds: float  # per step, on the device's own clock
    host_seconds: float  # of Python per step, nothing waited for
    longest: float  # seconds of the longest step, over those of the median one

    @property
    def shown(self) -> float:
        """Seconds per step in which the device had nothing to do, so that the host shows."""
        return max(0.0, self.seconds - self.device_seconds)


def fill(engine: Engine, size: int, context: int, k: int | None) -> None:
    """So many sequences with prompts of `context` tokens, fed; K drafts each, or as many as pay (None)."""
    if k is None:
        asked = SpeculationParams(mode=SpeculationMode.AUTO)
    else:
        asked = SpeculationParams(mode=SpeculationMode.FIXED if k else SpeculationMode.OFF, num_draft_tokens=k)
    engine.record(sizes=[places_for(size)], ks=None if k is None else [k])
    for i in range(size):
        prompt = tuple(torch.randint(engine.vocab_size, (context,)).tolist())
        most = engine.max_model_len - context
        sampling = SamplingParams(temperature=1.0, seed=i, max_tokens=most, ignore_eos=True)
        engine.add(Request(request_id=str(i), token_ids=prompt, sampling=sampling, speculation=asked))
    waiting = True
    while waiting:
        waiting = bool(engine.step().stats.prompt_tokens) or bool(engine.num_waiting)


def practise(engine: Engine, size: int, most_drafts: int) -> None:
    """Rounds of this size with each K, so that AUTO finds all graphs recorded, and no time that it learns holds one."""
    for k in range(most_drafts + 1):
        fill(engine, size, _FEW, k)
        for _ in range(_WARM):
            engine.step()
        empty(engine)


def measure(engine: Engine, card: Card, size: int, steps: int, warm_up: int = _WARM) -> Measured:
    """Time steps on their way; whoever is in the engine must have tokens left for them."""
    for _ in range(warm_up):
        engine.step()
    stats, each = timed(engine, card, steps)
    made, device = sum(s.generated_tokens for s in stats), sum(s.device_seconds for s in stats)
    assert engine.num_running == size, "some ended on the way"
    assert engine.loop == "rounds", "a round failed, and the rest were plain steps: the log says why"
    longest = max(each) / statistics.median(each)
    return Measured(sum(each) / steps, made / steps / size, device / steps, _host_seconds(engine, card), longest)


def timed(engine: Engine, card: Card, steps: int) -> tuple[list[StepStats], list[float]]:
    """What steps said of themselves, and the seconds of each. Nothing is waited for between them but by themselves."""
    wait(card.device)
    stats, timer = list[StepStats](), [perf_counter()]
    for _ in range(steps):
        stats.append(engine.step().stats)
        timer.append(perf_counter())
    wait(card.device)
    timer[-1] = perf_counter()
    return stats, [after - before for before, after in pairwise(timer)]


def _host_seconds(engine: Engine, card: Card) -> float:
    """The least that a step costs Python when there is nothing to wait for."""
    found = []
    for _ in range(_HOST):
        wait(card.device)
        start = perf_counter()
        engine.step()
        found.append(perf_counter() - start)
    return min(found)


def empty(engine: Engine) -> None:
    """Send everybody away."""
    engine.finish_all(FinishReason.ABORTED)


def settled(
    engine: Engine, card: Card, size: int, context: int, k: int | None, steps: int, warm_up: int = _WARM
) -> Measured:
    """So many sequences on their way, and then none."""
    fill(engine, size, context, k)
    got = measure(engine, card, size, steps, warm_up)
    empty(engine)
    return got
