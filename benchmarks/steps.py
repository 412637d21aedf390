"""One forward pass of a model of any Llama shape with random weights: milliseconds by rows, type and fusion.

    python -m benchmarks.steps --threads 2

Weights are created layer by layer and never downloaded. Variants take turns, round after round. Every round also
measures the memory bandwidth, because on a shared machine it drifts by more than the variants differ. A pass decodes
one token in each of M sequences; nothing is sampled.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import cast, get_args

import torch
from torch import nn
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel

from benchmarks.harness.machine import Memory
from benchmarks.harness.synthetic import SHAPES
from engine.attention import choose
from engine.attention.registry import AttentionName
from engine.choices import Rounded
from engine.kv.arena import KVArena
from engine.kv.batch import Feed
from engine.machine.threads import leave_to_pool, use_threads
from engine.model.fusion.fuse import fuse
from engine.model.fusion.stack import stack
from engine.model.linear.grouped import GroupedLinear, kernel_name
from engine.model.linear.packed import PackedLinear, pack, runs_in_c
from engine.model.quantize import quantise, skeleton
from engine.model.runner import ModelRunner, kv_layout
from engine.native import PackedMatrix

CONTEXT = 128


@dataclass
class Variant:
    """One way to run the shape, and its times by number of rows."""

    name: str
    model: PreTrainedModel
    attention: AttentionName
    milliseconds: dict[int, list[float]] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, shape: str) -> Variant:
        """Parse a name such as `int8-float32-fused`."""
        weights, dtype, how = name.split("-")
        model = random_model(LlamaConfig.from_dict(SHAPES[shape]), getattr(torch, dtype), weights=weights)
        if how in ("fused", "stacked"):
            fuse(model)
        if how == "stacked":
            pack(model)
            if not stack(model):
                raise SystemExit(f"{name}: its layers do not run in one call here")
        return cls(name, model, "auto")

    def runner(self, rows: int) -> ModelRunner:
        """Return a runner with K/V for `rows` sequences."""
        arena = KVArena(kv_layout(self.model.config, self.model.dtype), rows, CONTEXT, self.model.device)
        return ModelRunner(self.model, arena, choose(self.attention, self.model.device))

    @property
    def matrix_bytes(self) -> int:
        """Return the bytes of weights that a pass must read: every matrix once."""
        return sum(_bytes_of(module) for module in self.model.modules())


def _bytes_of(module: nn.Module) -> int:
    if isinstance(module, GroupedLinear):
        return cast("PackedMatrix", module.pack()).nbytes
    if isinstance(module, PackedLinear):
        return module.packed.nbytes
    return module.weight.numel() * module.weight.element_size() if isinstance(module, nn.Linear) else 0


@torch.no_grad()
def random_model(config: PreTrainedConfig, dtype: torch.dtype, *, weights: str) -> PreTrainedModel:
    """Return a model of this shape; matrices to be quantised are created in bfloat16, to take less memory."""
    model, drawn = skeleton(config, dtype), torch.randn(2**20).mul_(0.02)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:  # repeats the same million numbers, because drawing a billion takes a minute
                many = drawn.to(_type_for(module, dtype, weights)).repeat(-(-parameter.numel() // drawn.numel()))
                made = many[: parameter.numel()].view(parameter.shape)
                setattr(module, name, nn.Parameter(made, requires_grad=False))
    if weights in get_args(Rounded):
        quantise(model, cast("Rounded", weights))
    return model


def _type_for(module: nn.Module, dtype: torch.dtype, weights: str) -> torch.dtype:
    return torch.bfloat16 if weights in get_args(Rounded) and isinstance(module, nn.Linear) else dtype


def seconds(run: Callable[[], object]) -> float:
    """Return the time of one call."""
    start = perf_counter()
    run()
    return perf_counter() - start


def measure(variants: Sequence[Variant], rows: Sequence[int], rounds: int, passes: int) -> Iterator[float]:
    """Measure the variants in turns and fill in their times; yield each round's bandwidth."""
    memory = Memory(torch.get_num_threads())
    for _ in range(rounds):
        yield memory.bandwidth()
        for count in rows:
            feeds = [Feed([5 + i], CONTEXT - 1, [i]) for i in range(count)]
            for variant in variants:
                runner = variant.runner(count)
                runner.forward(feeds)
                times = [seconds(lambda: runner.forward(feeds)) for _ in range(passes)]  # noqa: B023 - called here
                # The minimum of a round, the median over rounds: other processes can only make a pass slower.
                variant.milliseconds.setdefault(count, []).append(1e3 * min(times))


def main() -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=SHAPES, default="1.1b")
    parser.add_argument("--variants", nargs="+", default=["int8-float32-fused", "int8-bfloat16-fused"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--threads", type=int, default=None)
    options = parser.parse_args()
    threads = use_threads(options.threads)
    variants = [Variant.of(name, options.shape) for name in options.variants]
    if all(runs_in_c(variant.model) for variant in variants):
        leave_to_pool()  # as in an engine: torch's threads, once started, spin on the cores that our threads need
    bandwidth = statistics.median(measure(variants, options.rows, options.rounds, options.passes))
    print(f"{options.shape}, {threads} threads, torch {torch.__version__}, kernel {kernel_name()}, "
          f"memory read at {bandwidth:.1f} GB/s\n")  # fmt: skip
    print("| variant | " + " | ".join(f"M={count}" for count in options.rows) + " | GB/s at the first |")
    print("|" + "---|" * (len(options.rows) + 2))
    for variant in variants:
        times = [statistics.median(variant.milliseconds[count]) for count in options.rows]
        rate = variant.matrix_bytes / times[0] / 1e6
        print(f"| {variant.name} | " + " | ".join(f"{time:.1f}" for time in times) + f" | {rate:.1f} |")


if __name__ == "__main__":
    main()
