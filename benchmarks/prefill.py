"""The cost of prefill: time to first token alone, and the delay that a prompt causes for sequences that decode.

    python -m benchmarks.prefill --shape 1.1b --weights int8 --lengths 128 512 2048

Uses a model of random weights of any shape. For every bound on a step (`max_step_ms`; 0 is none) and every length, it
measures one prompt alone, and the same prompt while other sequences decode. For the latter it records the gaps between
their tokens, from the prompt's arrival to its first token. Lengths and bounds take turns, round after round.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from time import perf_counter

import torch
from transformers import LlamaConfig, PreTrainedModel

from benchmarks.harness.machine import Memory
from benchmarks.harness.synthetic import SHAPES
from benchmarks.steps import random_model
from engine.config import EngineConfig
from engine.engine import Engine
from engine.machine.threads import use_threads
from engine.model.fusion.fuse import fuse
from engine.model.fusion.stack import stack
from engine.model.linear.grouped import kernel_name
from engine.model.linear.packed import pack
from engine.params import SamplingParams
from engine.startup.build import assemble
from engine.types import FinishReason, Request

NEVER = 1e9  # milliseconds
SHORT = 16  # tokens; prompt length of the sequences that decode
WARM = 5  # decoding steps before the prompt arrives


@dataclass(slots=True)
class Cell:
    """One bound and one length; times in seconds."""

    bound: float
    length: int
    alone: list[float] = field(default_factory=list)  # to the first token
    beside: list[float] = field(default_factory=list)
    decoding: list[float] = field(default_factory=list)  # of a step before the prompt arrived
    gaps: list[float] = field(default_factory=list)  # between tokens of the others, until the prompt's first

    def row(self) -> str:
        """Return the row in Markdown: first tokens in seconds, the rest in milliseconds."""
        gaps = sorted(self.gaps)
        shown = statistics.median(gaps), gaps[math.ceil(0.99 * len(gaps)) - 1], gaps[-1]
        first = (statistics.median(times) for times in (self.alone, self.beside))
        bound = "none" if self.bound == NEVER else f"{self.bound:g}"
        cells = [*(f"{seconds:.2f}" for seconds in first), f"{1e3 * statistics.median(self.decoding):.0f}"]
        return f"| {bound} | {self.length} | " + " | ".join([*cells, *(f"{1e3 * gap:.0f}" for gap in shown)]) + " |"


class Reader:
    """An engine without drafts or a prefix cache, and its requests."""

    def __init__(self, model: PreTrainedModel, bound: float, longest: int, places: int) -> None:
        self._names = count()
        settings = {
            "target": "random", "proposer": "none", "prefix_cache": False, "max_step_ms": bound,
            "max_batch_size": places, "max_model_len": longest,
        }  # fmt: skip
        self._engine: Engine = assemble(EngineConfig.model_validate(settings), model)

    def _add(self, length: int, most: int) -> str:
        name = str(next(self._names))
        tokens = tuple((7 * i + 11) % self._engine.vocab_size for i in range(length))
        self._engine.add(
            Request(request_id=name, token_ids=tokens, sampling=SamplingParams(max_tokens=most, ignore_eos=True))
        )
        return name

    def _until_first(self, name: str) -> Iterator[float]:
        """Yield the seconds of each step up to the one that produces this request's first token."""
        found = False
        while not found:
            start = perf_counter()
            events = self._engine.step().events
            yield perf_counter() - start
            found = any(event.request_id == name and event.token_ids for event in events)

    def alone(self, length: int) -> float:
        """Return seconds to the first token of a prompt alone."""
        return sum(self._until_first(self._add(length, 1)))

    def beside(self, length: int, others: int) -> tuple[list[float], list[float]]:
        """Return the seconds of steps before and after the prompt arrives, while `others` sequences decode."""
        names = [self._add(SHORT, self._engine.max_model_len - SHORT) for _ in range(others)]
        for name in names[-1:]:
            list(self._until_first(name))
        before = []
        for _ in range(WARM):
            start = perf_counter()
            self._engine.step()
            before.append(perf_counter() - start)
        gaps = list(self._until_first(self._add(length, 1)))
        self._engine.finish_all(FinishReason.CANCELLED)
        return before, gaps


def served(shape: str, weights: str, dtype: str, longest: int) -> PreTrainedModel:
    """Return a random model of this shape, prepared as for serving on a CPU."""
    model = random_model(
        LlamaConfig.from_dict(SHAPES[shape] | {"max_position_embeddings": longest}),
        getattr(torch, dtype),
        weights=weights,
    )
    fuse(model)
    pack(model)
    stack(model)
    return model


def measure(model: PreTrainedModel, cells: Sequence[Cell], others: int, rounds: int, longest: int) -> Iterator[float]:
    """Fill the cells; yield each round's memory bandwidth."""
    memory = Memory(torch.get_num_threads())
    readers = {cell.bound: Reader(model, cell.bound, longest, others + 1) for cell in cells}
    for reader in readers.values():  # like calibration at load: the engine then knows its costs
        reader.beside(SHORT * 16, others)
    for _ in range(rounds):
        yield memory.bandwidth()
        for cell in cells:
            reader = readers[cell.bound]
            cell.alone.append(reader.alone(cell.length))
            before, gaps = reader.beside(cell.length, others)
            cell.beside.append(sum(gaps))
            cell.decoding += before
            cell.gaps += gaps


def main() -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=SHAPES, default="1.1b")
    parser.add_argument("--weights", choices=("native", "int8", "int4"), default="int8")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512, 2048, 8192])
    parser.add_argument("--bounds", type=float, nargs="+", default=[0, 250], help="milliseconds; 0 is none")
    parser.add_argument("--others", type=int, default=4, help="who decode meanwhile")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=None)
    options = parser.parse_args()
    threads = use_threads(options.threads)
    longest = max(options.lengths) + 1024
    model = served(options.shape, options.weights, options.dtype, longest)
    cells = [Cell(bound or NEVER, length) for length in options.lengths for bound in options.bounds]
    bandwidth = statistics.median(measure(model, cells, options.others, options.rounds, longest))
    print(f"{options.shape}, {options.weights}, {threads} threads, {options.others} others, kernel {kernel_name()}, "
          f"memory read at {bandwidth:.1f} GB/s\n")  # fmt: skip
    print(
        "| bound, ms | prompt | first token alone, s | beside others, s | decoding, ms | gap p50 | gap p99 | gap max |"
    )
    print("|" + "---|" * 8)
    for cell in cells:
        print(cell.row())


if __name__ == "__main__":
    main()
