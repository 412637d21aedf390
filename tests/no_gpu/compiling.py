"""Whole engines whose every launch is bound and specialised as for a card: `python -m tests.no_gpu.compiling`.

A program of its own: kernels must be defined without the interpreter. For each of a few models it warms an engine up,
then has it serve random requests; what launches mean is computed in plain torch. Written as JSON: a line for each
specialisation of each kernel that each part of that launched, and a line for what each engine did.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
from transformers import Gemma2Config, LlamaConfig, PreTrainedConfig, PreTrainedModel

from benchmarks.harness.bare import options as bare_options
from pilotfish.engine.attention import paged, registry
from pilotfish.engine.device_loop.graph_cache import in_order_of_worth
from pilotfish.engine.device_loop.round import RoundOps
from pilotfish.engine.device_loop.slots import IDLE
from pilotfish.engine.engine import Engine
from pilotfish.engine.kernels import sampling
from pilotfish.engine.model.decoder.ops import LayerOps
from pilotfish.engine.params import SamplingParams, SpeculationParams
from pilotfish.engine.startup.build import assemble
from pilotfish.engine.startup.warm import make_ready
from pilotfish.engine.types import FinishReason, Request
from tests import fakes, zoo
from tests.loops import LAWS, PLAIN, AnyK, gib
from tests.no_gpu import meaning
from tests.no_gpu.stand_in import StandIn

VOCAB = 2101  # two blocks of a kernel's, and three of another's
PAGE, PLACES, MOST_DRAFTS, REQUESTS = 16, 8, 4, 10
_SIZES = {"vocab_size": VOCAB, "hidden_size": 96, "intermediate_size": 256, "eos_token_id": 2}


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
        return [zoo.on_kernels(model, LayerOps.kernels()) for model in pair]


# A group of heads that is no power of two.
_LLAMA = {"num_attention_heads": 12, "num_key_value_heads": 1, "head_dim": 16, "num_hidden_layers": 1}
# Windows in every second layer, softcaps.
_GEMMA = {
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "query_pre_attn_scalar": 32,
    "num_hidden_layers": 2, "sliding_window": 100,
}  # fmt: skip
# The first has sequences of more than sixteen splits of keys, and prompts of more tiles than a card runs at a time.
CASES = {
    "llama in float32": Case(LlamaConfig(**_SIZES, **_LLAMA, max_position_embeddings=4608), torch.float32, 4300),
    "gemma2 in bfloat16": Case(Gemma2Config(**_SIZES, **_GEMMA, max_position_embeddings=1024), torch.bfloat16),
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


def prompt_sizes(case: Case) -> list[int]:
    """Of one page, two, many; of even and odd numbers of tiles; of one split of keys, two, as many as there can be."""
    return [1, 2, 5, 16, 17, 33, 64, 241, 257, 300, case.longest - 2]


def warm_up(engine: Engine) -> None:
    """As an engine is made ready on a card, where rounds of these shapes are recorded besides."""
    make_ready(engine, is_compiled=True)
    rounds: Any = engine.rounds
    for shape in in_order_of_worth(PLACES, MOST_DRAFTS):
        nobody = torch.full((shape.size,), IDLE, dtype=torch.int64)
        rounds.graphs.of(shape.size, shape.k, truncated=shape.truncated, rejects=False)[1](nobody, lambda: None)


def request(case: Case, i: int) -> Request:
    """All laws; some decode in plain steps."""
    rng = random.Random(1000 + i)
    size = case.longest - 100 if i == 3 else rng.choice([*prompt_sizes(case)[:-1], rng.randint(1, 200)])
    tokens = tuple(rng.randrange(3, VOCAB) for _ in range(size))
    law = LAWS[rng.randrange(len(LAWS))] if i > 6 else LAWS[i % 2 * 3]  # no cuts among the first
    shape = {name: getattr(law, name) for name in ("temperature", "top_p", "top_k", "min_p")}
    plain = {"logprobs": 2} if rng.random() < 0.2 else {}
    most = min(rng.randint(1, 60), case.longest - size)
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
    assert engine.rounds.name == "rounds", "a round failed"
    return said.tokens, done


def main() -> None:
    torch.set_num_threads(1)
    stand_in = StandIn().install()
    meaning.install()
    registry.is_interpreted = lambda: True  # the stand-in launches what it is given, on any device
    ops = RoundOps(paged.attend, sampling.commit)
    for name, case in CASES.items():
        watch, pair = Watch(stand_in, name), case.pair()
        engine = engine_of(case, pair, ops, "triton")
        watch.end_of("load")
        warm_up(engine)
        watch.end_of("warm-up")
        tokens, done = serve(engine, case)
        watch.end_of("traffic")
        print(json.dumps({"case": name, "done": done}), flush=True)
        if case.dtype == torch.float32:
            plainly = serve(engine_of(case, pair, PLAIN, "reference"), case)[0]
            print(json.dumps({"case": name, "equals_plain": plainly == tokens}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
