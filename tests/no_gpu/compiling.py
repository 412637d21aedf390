"""Whole engines whose every launch is bound and compiled as for a card: `python -m tests.no_gpu.compiling`.

A program of its own: kernels must be defined without the interpreter. For each of a few models it warms an engine up,
then has it serve random requests; what launches mean is computed in plain torch. Written as JSON: a line for each
specialisation of each kernel that each part of that launched, a line for what each engine did, and what each
specialisation takes.
"""

from __future__ import annotations

import inspect
import json
import os
import random
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
from transformers import Gemma2Config, LlamaConfig, PreTrainedConfig, PreTrainedModel

from benchmarks.harness.bare import options as bare_options
from engine.attention import paged, registry
from engine.device_loop.round import RoundOps
from engine.device_loop.shapes import in_order_of_worth
from engine.device_loop.slots import IDLE
from engine.engine import Engine
from engine.model.fusion.fuse_cuda import fuse_for_cuda
from engine.model.linear.experts import StackedExperts
from engine.model.linear.w4 import W4Linear
from engine.native.experts import ExpertGate
from engine.params import SamplingParams, SpeculationParams
from engine.startup.build import assemble
from engine.startup.warm import make_ready
from engine.types import FinishReason, Request
from tests import fakes, zoo
from tests.loops import LAWS, PLAIN, AnyK, gib
from tests.no_gpu import meaning
from tests.no_gpu.stand_in import StandIn

VOCAB = 2101  # two blocks of a kernel's, and three of another's
_FP8 = "fp8e4nv"
PAGE, PLACES, MOST_DRAFTS, REQUESTS = 16, 8, 4, 10
_SIZES = {"vocab_size": VOCAB, "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 2, "eos_token_id": 2}


@dataclass(frozen=True)
class Case:
    """A target and a draft of one shape, and how long the sequences are that it serves."""

    config: PreTrainedConfig
    dtype: torch.dtype
    longest: int = 400

    def pair(self) -> list[PreTrainedModel]:
        """As they would be loaded on a card."""
        target = zoo.with_large_weights(self.config)
        pair = [model.to(self.dtype) for model in (zoo.ours(target), zoo.near(target, 0.005))]
        for model in pair:
            fuse_for_cuda(model)
        return pair


def llama(group: int, kv_heads: int, head_dim: int, longest: int = 1024) -> PreTrainedConfig:
    heads = {"num_attention_heads": group * kv_heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    return LlamaConfig(**_SIZES, **heads, max_position_embeddings=longest)


def gemma() -> PreTrainedConfig:
    """Windows in every second layer, softcaps, large heads."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 256, "query_pre_attn_scalar": 256}
    return Gemma2Config(**_SIZES, **heads, sliding_window=100, max_position_embeddings=1024)


# The first has sequences of more than sixteen splits of keys, prompts of more tiles than a card runs at a time, and a
# group that is no power of two.
CASES = {
    "llama in bfloat16": Case(llama(12, 1, 128, 4608), torch.bfloat16, longest=4300),
    "llama in float32": Case(llama(4, 1, 128), torch.float32),
    "gemma2 in bfloat16": Case(gemma(), torch.bfloat16),
}


class Watch:
    """What was compiled and launched, part by part."""

    def __init__(self, stand_in: StandIn, case: str) -> None:
        self._stand_in, self._case, self._old = stand_in, case, set(stand_in.seen)
        stand_in.launched.clear()

    def end_of(self, part: str) -> None:
        """Tell of each specialisation that this part launched; `is_new` is one that no part before had compiled."""
        for key in sorted(self._stand_in.launched):
            name, is_new = self._stand_in.seen[key].name, key not in self._old
            told = {"case": self._case, "part": part, "kernel": name, "key": key, "is_new": is_new}
            print(json.dumps(told), flush=True)
        self._old = set(self._stand_in.seen)
        self._stand_in.launched.clear()


def engine_of(case: Case, pair: list[PreTrainedModel], ops: RoundOps, attention: str) -> Engine:
    """Few pages, so that the newest must make room now and then."""
    pages = -(-case.longest // PAGE) + 4
    config = bare_options(
        "target", draft="draft", loop="rounds", attention=attention, speculation="fixed", max_model_len=case.longest,
        page_size=PAGE, kv_memory=gib(pages, pair, PAGE), max_batch_size=PLACES, max_batch_tokens=1200,
        num_draft_tokens=MOST_DRAFTS, warm_up_seconds=0, max_step_ms=1e9, dtype=str(case.dtype).removeprefix("torch."),
    )  # fmt: skip
    return assemble(config, *pair, ops=ops)


def kernels() -> RoundOps:
    from engine.kernels import commit, sampling

    return RoundOps(paged.attend, sampling.choose, commit.commit)


def prompt_sizes(case: Case) -> list[int]:
    """Of one page, two, many; of even and odd numbers of tiles; of one split of keys, two, as many as there can be."""
    return [1, 2, 5, 16, 17, 33, 64, 241, 257, 300, case.longest - 2]


def warm_up(engine: Engine) -> None:
    """As an engine is made ready on a card, where rounds of these shapes are recorded besides."""
    make_ready(engine, is_compiled=True)
    rounds: Any = engine.rounds
    for shape in in_order_of_worth(PLACES, MOST_DRAFTS):
        nobody = torch.full((shape.size,), IDLE, dtype=torch.int64)
        rounds.repertoire.of(shape.size, shape.k, truncated=shape.truncated, rejects=False)[1](nobody, lambda: None)


def request(case: Case, i: int) -> Request:
    """All laws; some decode in plain steps."""
    rng = random.Random(1000 + i)
    size = case.longest - 100 if i == 3 else rng.choice([*prompt_sizes(case)[:-1], rng.randint(1, 200)])
    tokens = tuple(rng.randrange(3, VOCAB) for _ in range(size))
    law = LAWS[rng.randrange(len(LAWS))] if i > 6 else LAWS[i % 2 * 3]  # no cuts among the first
    shape = {name: getattr(law, name) for name in ("temperature", "top_p", "top_k", "min_p")}
    plain = {"logprobs": 2} if rng.random() < 0.2 else {}
    most = min(rng.randint(1, 80), case.longest - size)
    sampling = SamplingParams(**shape, **plain, max_tokens=most, ignore_eos=True, seed=i)
    wishes = SpeculationParams(proposer="ngram") if rng.random() < 0.1 else SpeculationParams()
    return Request(request_id=str(i), token_ids=tokens, sampling=sampling, speculation=wishes)


def serve(engine: Engine, case: Case) -> tuple[dict[str, list[int]], Counter[str]]:
    """Requests that come and go, some before their end; their tokens, and what there was of everything."""
    rng, said, done = random.Random(1), fakes.Outputs(), Counter[str]()
    waiting = [request(case, i) for i in range(REQUESTS)]
    control = AnyK(1)
    engine.scheduler.round_control = engine.scheduler.control = engine.round_control = engine.control = control
    while waiting or engine.has_work:
        for _ in range(min(len(waiting), rng.choice([0, 0, 1, 2, 6]))):
            engine.add(waiting.pop(0))
        if engine.has_work and rng.random() < 0.02:
            said.take(engine.finish(rng.choice(sorted(engine._live)), FinishReason.ABORTED))
            done["ends before their time"] += 1
        step = engine.step()
        said.take(step.events)
        done["preemptions"] += step.stats.preempted
        done["prompts beside others"] += bool(step.stats.prompt_tokens and engine.rounds.on_device)
        done["drafts kept"] += sum(sum(event.from_draft) for event in step.events)
        for forward in step.stats.forwards:
            done[forward.kind] += 1
    engine.check_invariants()
    assert engine.loop == "rounds", "a round failed"
    return said.tokens, done


def main() -> None:
    torch.set_num_threads(1)
    stand_in = StandIn(90).install()
    meaning.install()
    registry.is_interpreted = lambda: True  # the stand-in launches what it is given, on any device
    for name, case in CASES.items():
        watch, pair = Watch(stand_in, name), case.pair()
        engine = engine_of(case, pair, kernels(), "triton")
        watch.end_of("load")
        warm_up(engine)
        watch.end_of("warm-up")
        tokens, done = serve(engine, case)
        watch.end_of("traffic")
        print(json.dumps({"case": name, "done": done}), flush=True)
        if case.dtype == torch.float32:
            plainly = serve(engine_of(case, pair, PLAIN, "reference"), case)[0]
            print(json.dumps({"case": name, "equals_plain": plainly == tokens}), flush=True)
    watch = Watch(stand_in, "sizes of 8B")
    launch_as_8b()
    watch.end_of("launches")
    tell_resources(stand_in)


def launch_as_8b() -> None:
    """What hangs on sizes that whole engines here are too small for: norms, gates, draws; and experts."""
    from engine.kernels import experts, rows, sampling, w4
    from engine.kernels.args import TILE_OUTPUTS, SamplerRows

    raw: Any = inspect.unwrap  # launched, without a meaning
    whole, real = torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.float64)
    x, scale = torch.zeros(3, 4096, dtype=torch.bfloat16), torch.zeros(4096)
    raw(rows.add_norm)(x, None, scale, 1e-5)
    raw(rows.add_norm)(x, x, scale, 1e-5)
    both = torch.zeros(3, 2 * 14336, dtype=torch.bfloat16)
    raw(rows.gate)(both, "silu")
    raw(rows.add_norm_round)(x, x, scale, 1e-5)
    raw(rows.gate_round)(both, "silu")
    raw(rows.round_rows)(x)
    matrix = W4Linear(torch.nn.Linear(4096, TILE_OUTPUTS, bias=False, dtype=torch.bfloat16), w4.matmul)
    for num_rows in (1, 6, 40, 200):
        matrix(torch.zeros(num_rows, 4096, dtype=torch.bfloat16))
    # As Qwen3-30B-A3B has them, but fewer.
    up, down = torch.zeros(16, 2 * 768, 2048, dtype=torch.bfloat16), torch.zeros(16, 2048, 768, dtype=torch.bfloat16)
    mixture = StackedExperts(up, down, None, ExpertGate(), raw(experts.mix))
    for num_rows in (1, 17, 300):
        chosen = torch.zeros(num_rows, 8, dtype=torch.int64)
        mixture(torch.zeros(num_rows, 2048, dtype=torch.bfloat16), chosen, chosen.bfloat16())
    samplers = SamplerRows(real.float(), whole, real, real, whole, whole, whole)
    for truncated in (False, True):
        raw(sampling.choose)(torch.zeros(3, 128256, dtype=torch.bfloat16), samplers, truncated=truncated)


def tell_resources(stand_in: StandIn) -> None:
    """Of all that was compiled; and of the largest of each kernel, compiled for sm_80 as well."""
    largest: dict[str, Any] = {}
    for key, compiled in stand_in.seen.items():
        found = compiled.resources()
        told = {"key": key, "kernel": compiled.name, "seconds": compiled.seconds, "blocks": found.blocks(90)}
        print(json.dumps(told | asdict(found)), flush=True)
        if _FP8 in key:
            continue  # which sm_80 does not have
        if compiled.name not in largest or found.shared > largest[compiled.name][0]:
            largest[compiled.name] = found.shared, compiled
    for name, (_, compiled) in largest.items():
        found = compiled.anew(80)
        print(json.dumps({"sm_80": True, "kernel": name, "blocks": found.blocks(80)} | asdict(found)), flush=True)


if __name__ == "__main__":
    sys.exit(main())
