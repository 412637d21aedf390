"""A hybrid of about 1.1B parameters with random weights: what rolling a state back costs, and what drafts gain.

    python -m benchmarks.hybrid --weights int8

The model is a Qwen 3.5 (gated delta rule in three of four layers), a Granite 4 (Mamba 2) or an LFM 2 (short
convolutions). A step with K drafts is one pass over K + 1 rows, which settles the first and logs the others. It is
compared, in turns, with the same pass that settles all rows in the slot that it reads, after which nothing can be taken
back and no pass be repeated, and with one that first applies as many logged rows again, as after a step whose drafts
were all kept. Then a real draft model of 160M runs, and its drafts are replaced by some that are accepted at the chosen
rate (`benchmarks/harness/replay.py`).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoConfig, LlamaConfig, PreTrainedModel

from benchmarks.harness.machine import machine
from benchmarks.harness.replay import NAME, ReplayProposer, Script
from benchmarks.harness.synthetic import SHAPES
from benchmarks.harness.timing import Batch, abreast, run_turn, way
from benchmarks.steps import random_model, seconds
from engine.attention import choose
from engine.config import EngineConfig
from engine.engine import Engine
from engine.kv.arena import KVArena
from engine.kv.batch import Feed
from engine.machine.threads import leave_to_pool, use_threads
from engine.model.fusion.fuse import fuse
from engine.model.fusion.stack import stack
from engine.model.linear.packed import pack, runs_in_c
from engine.model.runner import ModelRunner, layout_of_model, vocab_size
from engine.recurrent.arena import StateArena, StateLayout
from engine.startup.build import assemble
from engine.startup.calibrate import calibrate
from engine.types import StateSpan

CONTEXT, PAGE = 128, 256
_COMMON = {"hidden_size": 2048, "vocab_size": 32000, "max_position_embeddings": 4096, "bos_token_id": None,
           "eos_token_id": None, "pad_token_id": None, "tie_word_embeddings": False}  # fmt: skip
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {
        "num_hidden_layers": 20, "intermediate_size": 5120, "num_attention_heads": 16, "num_key_value_heads": 4,
        "head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
    "granitemoehybrid": {
        "num_hidden_layers": 24, "intermediate_size": 5120, "shared_intermediate_size": 5120, "num_local_experts": 0,
        "num_experts_per_tok": 0, "num_attention_heads": 16, "num_key_value_heads": 4, "mamba_n_heads": 64,
        "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1,
        "layer_types": [*(["mamba"] * 5), "attention"] * 4,
    },
    "lfm2": {
        "num_hidden_layers": 16, "block_ff_dim": 8192, "block_auto_adjust_ff_dim": False, "num_attention_heads": 32,
        "num_key_value_heads": 8, "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    },
}  # fmt: skip


def hybrid(kind: str, weights: str, layers: int | None = None) -> PreTrainedModel:
    """Return a model of this family as an engine would serve it; `layers` for a test with fewer."""
    config = AutoConfig.for_model(kind, **_COMMON | HYBRIDS[kind] | ({"num_hidden_layers": layers} if layers else {}))
    dtype = torch.bfloat16 if weights == "native" else torch.float32
    model = random_model(config, dtype, weights=weights)
    _tame(model)
    return served(model)


def served(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model with our replacements for CPUs."""
    fuse(model)
    pack(model)
    stack(model)
    return model


@torch.no_grad()
def _tame(model: PreTrainedModel) -> None:
    """Give norms and decays numbers of trained models: random ones would let activations overflow."""
    for name, parameter in model.named_parameters():
        last = name.rpartition(".")[2]
        if parameter.ndim == 1 and not name.endswith("bias"):
            parameter.fill_(0.0 if last == "A_log" else 1.0)


class Rollback:
    """Passes over K + 1 rows of one sequence that can take K of them back, and passes that cannot."""

    def __init__(self, model: PreTrainedModel, drafts: int) -> None:
        layout = StateLayout.of(model)
        assert layout is not None, "a model without states has nothing to compare"
        arena = KVArena(layout_of_model(model), 1, PAGE, model.device)
        states = StateArena(layout, 4, drafts, model.device)
        self._runner = ModelRunner(model, arena, choose("auto", model.device), states=states)
        tokens, stop = [5] * (drafts + 1), CONTEXT + drafts + 1
        self.ways = {
            "all settled in place": self._feed(tokens, stop, write=1),
            "all settled in another slot": self._feed(tokens, stop),
            "drafts logged": self._feed(tokens, CONTEXT + 1),
            "drafts logged, as many replayed": self._feed(tokens, CONTEXT + 1, CONTEXT - drafts),
        }
        self.megabytes = layout.bytes_per_slot(drafts) / 1e6

    @staticmethod
    def _feed(tokens: Sequence[int], settled: int, base: int = CONTEXT, write: int = 2) -> Feed:
        return Feed(tokens, CONTEXT, [0], len(tokens), state=StateSpan(1, base, write, settled))

    def measure(self, rounds: int) -> dict[str, float]:
        """Return milliseconds of each way: medians over rounds, in which the ways take turns."""
        times: dict[str, list[float]] = {name: [] for name in self.ways}
        for _ in range(rounds):
            for name, feed in self.ways.items():
                times[name].append(1e3 * seconds(lambda feed=feed: self._runner.forward([feed])))  # type: ignore[misc]
        return {name: statistics.median(each[1:]) for name, each in times.items()}


def gains(model: PreTrainedModel, options: argparse.Namespace) -> dict[int | str, float]:
    """Return tokens per second over plain decoding, by K: medians over rounds, in which engines run side by side."""
    shape = LlamaConfig.from_dict(SHAPES["160m"] | {"eos_token_id": None, "bos_token_id": None})
    dtype = torch.bfloat16 if options.weights == "native" else torch.float32
    draft, script = served(random_model(shape, dtype, weights=options.weights)), Script(options.rate)
    ways: list[int | str] = [0, *options.k, "auto"]
    engines = {k: _engine(model, draft, script, options) for k in ways}
    prompt = tuple(range(7, 7 + CONTEXT))
    script.record(prompt, run_turn(engines[0], [prompt], options.tokens, way(0)).tokens[0])
    found: dict[int | str, list[float]] = {k: [] for k in ways}
    for _ in range(options.rounds):
        batches = {str(k): Batch(engines[k], [prompt], options.tokens, way(k, None if k == 0 else NAME)) for k in ways}
        done = abreast(batches)
        for k in ways:
            assert done[str(k)].tokens == done["0"].tokens, "drafts changed the text"
            found[k].append(done[str(k)].speed / done["0"].speed)
    return {k: statistics.median(each) for k, each in found.items()}


def _engine(model: PreTrainedModel, draft: PreTrainedModel, script: Script, options: argparse.Namespace) -> Engine:
    settings = {"target": "hybrid", "draft": "160m", "proposer": NAME, "max_batch_size": 1, "max_model_len": 1024,
                "num_draft_tokens": 8, "threads": options.threads, "kv_memory": 2.0}  # fmt: skip
    config = EngineConfig.model_validate(settings)
    width = vocab_size(model)
    engine = assemble(config, model, draft, wrappers={NAME: lambda inner: ReplayProposer(inner, script, width)})
    with engine.rehearsing():
        engine.warm_up()
    calibrate(engine, config.warm_up_seconds)
    return engine


def main() -> None:
    """Print both tables in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kind", choices=HYBRIDS, default="qwen3_5_text")
    parser.add_argument("--weights", choices=["native", "int8", "int4"], default="native", help="native: bfloat16")
    parser.add_argument("--rate", type=float, default=0.8, help="of drafts that are right")
    parser.add_argument("--drafts", type=int, default=4, help="K of the passes that are compared")
    parser.add_argument("--k", type=int, nargs="*", default=[2, 4, 6])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=None)
    parser.add_argument("--threads", type=int, default=None)
    options = parser.parse_args()
    threads = use_threads(options.threads)
    model = hybrid(options.kind, options.weights, options.layers)
    if runs_in_c(model):
        leave_to_pool()
    found = ", ".join(f"{name} {value}" for name, value in machine().items())
    print(f"{options.kind}, {options.weights} weights, {threads} threads; {found}\n")
    passes = Rollback(model, options.drafts)
    times = passes.measure(4 * options.rounds)
    first = next(iter(times))
    print(f"| a pass over {options.drafts + 1} rows | ms | over {first} |\n|---|---|---|")
    for name, each in times.items():
        print(f"| {name} | {each:.1f} | {each / times[first]:.3f} |")
    print(f"\nA slot takes {passes.megabytes:.1f} MB.\n")
    print(f"| K, {options.rate:g} accepted | over plain |\n|---|---|")
    for k, gain in gains(model, options).items():
        print(f"| {k} | {gain:.2f} |")


if __name__ == "__main__":
    main()
