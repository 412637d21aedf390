"""Engines of random weights on a GPU, at an acceptance that was chosen, and what their steps take.

Random models never agree, so which drafts are kept is drawn on the device, while all is computed as if it counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from benchmarks.bare import options
from benchmarks.cuda_kernels import Card, wait
from engine import noise
from engine.attention.registry import ATTENTION_NAME
from engine.build import assemble
from engine.engine import Engine
from engine.fuse_cuda import fuse_for_cuda
from engine.kernels.args import Committed, Tracks
from engine.loops import ops_on
from engine.noise import Stream
from engine.rounds import Ops
from engine.runner import kv_layout, prepare
from engine.types import FinishReason, Request, SamplingParams, SpeculationMode, SpeculationParams

PAGE, CHUNK = 32, 8192  # tokens
_ROPE = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 8192}  # fmt: skip
_SHARED = {"vocab_size": 128256, "max_position_embeddings": 131072, "rope_parameters": _ROPE, "num_attention_heads": 32,
           "num_key_value_heads": 8, "eos_token_id": None}  # fmt: skip
SHAPES: dict[str, Any] = {
    "8b": {**_SHARED, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "head_dim": 128},
    "1b": {**_SHARED, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64,
           "tie_word_embeddings": True},
    "tiny": {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096, "eos_token_id": None},
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Pair:
    """Two models with random weights."""

    target: PreTrainedModel
    draft: PreTrainedModel

    @classmethod
    def of(cls, shapes: tuple[str, str], card: Card, attention: str = ATTENTION_NAME) -> Pair:
        """Made on the device; with our attention they are fused for it."""
        return cls(*(_random_model(LlamaConfig(**SHAPES[shape]), card, attention) for shape in shapes))


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


def round_limit(pair: Pair, card: Card, size: int, context: int, k: int) -> float:
    """The least that a round can take: a draft pass of two rows, K - 1 of one, a verification."""
    drafting = sum(pass_seconds(pair.draft, card, size, 2 if i == 0 else 1, context) for i in range(k))
    return drafting + pass_seconds(pair.target, card, size, k + 1, context)


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


def engine_of(pair: Pair, card: Card, acceptance: float, size: int, longest: int, most_drafts: int) -> Engine:
    """An engine for up to `size` sequences, all of them in rounds on the device."""
    real = ops_on(card.device)
    ops = Ops(real.attend, real.choose, kept_at(acceptance, real.commit))
    pages = size * -(-longest // PAGE)
    both = sum(kv_layout(model.config, torch.bfloat16).bytes_per_token for model in (pair.target, pair.draft))
    config = options(
        "random", draft="random", device=card.device.type, dtype="bfloat16", loop="rounds", proposer="model",
        num_draft_tokens=most_drafts, max_batch_size=size, max_batch_tokens=max(CHUNK, size), max_model_len=longest,
        page_size=PAGE, prefix_cache=False, kv_memory=(pages * PAGE * both + 1) / 2**30,
    )  # fmt: skip
    return assemble(config, pair.target, pair.draft, ops=ops)


@dataclass(frozen=True, slots=True)
class Measured:
    """What steps of one setting took."""

    seconds: float  # per step
    tokens: float  # per step and sequence
    device_seconds: float  # per step, on the device's own clock
    host_seconds: float  # of Python per step, nothing waited for

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
    for i in range(size):
        prompt = tuple(torch.randint(engine.vocab_size, (context,)).tolist())
        most = engine.max_model_len - context
        sampling = SamplingParams(temperature=1.0, seed=i, max_tokens=most, ignore_eos=True)
        engine.add(Request(request_id=str(i), token_ids=prompt, sampling=sampling, speculation=asked))
    waiting = True
    while waiting:
        waiting = bool(engine.step().stats.prompt_tokens) or bool(engine.num_waiting)


def measure(engine: Engine, card: Card, size: int, steps: int, warm_up: int) -> Measured:
    """Time steps on their way; whoever is in the engine must have tokens left for them."""
    for _ in range(warm_up):
        engine.step()
    wait(card.device)
    start = perf_counter()
    stats = [engine.step().stats for _ in range(steps)]
    wait(card.device)
    seconds = (perf_counter() - start) / steps
    made, device = sum(s.generated_tokens for s in stats), sum(s.device_seconds for s in stats)
    assert engine.num_running == size, "some ended on the way"
    return Measured(seconds, made / steps / size, device / steps, _host_seconds(engine, card))


def _host_seconds(engine: Engine, card: Card, times: int = 8) -> float:
    """The least that a step costs Python when there is nothing to wait for."""
    found = []
    for _ in range(times):
        wait(card.device)
        start = perf_counter()
        engine.step()
        found.append(perf_counter() - start)
    return min(found)


def empty(engine: Engine) -> None:
    """Send everybody away."""
    engine.finish_all(FinishReason.ABORTED)
