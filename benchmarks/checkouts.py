"""Compare the speed of the embedded pair in two checkouts of Pilotfish, measured in turns in one run.

    python -m benchmarks.checkouts OLD NEW --rounds 25

Each checkout runs in its own process, which uses only the public names of `engine`. In each round both generate the
same batch, in alternating order. Each ratio compares the two within one round; the table shows the median, the smallest
and the largest ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

from engine import LLM, SamplingParams, SpeculationParams
from models import corpus, embedded_draft, embedded_target

TOKENS, PROMPT = 64, 300  # tokens of each output; characters of each prompt
WEIGHTS, WAYS, BATCHES = ("native", "int8"), ("off", "fixed", "auto"), (1, 8)
NUM_DRAFT = 4


class Checkout:
    """A handle of a process that generates with the code of one folder."""

    def __init__(self, folder: Path, exits: ExitStack) -> None:
        environment = os.environ | {"PYTHONPATH": f"{folder}:{folder / 'proto'}"}
        command = [sys.executable, str(Path(__file__).resolve()), "serve"]
        self._process = exits.enter_context(
            subprocess.Popen(
                command, cwd=folder, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        )
        exits.callback(self._process.terminate)

    def seconds(self, weights: str, way: str, batch: int) -> float:
        """Return the time of one batch."""
        assert self._process.stdin is not None, "it has pipes"
        assert self._process.stdout is not None, "it has pipes"
        self._process.stdin.write(json.dumps([weights, way, batch]) + "\n")
        self._process.stdin.flush()
        return float(json.loads(self._process.stdout.readline()))


def serve() -> None:
    """Run the process: each input line is JSON that names a batch, each output line is the time in seconds."""
    modes: Any = sys.modules[SpeculationParams.__module__].SpeculationMode
    engines: dict[str, LLM] = {}
    texts = [text[:PROMPT] for text in corpus.held_out_prompts(max(BATCHES))]
    for line in sys.stdin:
        weights, way, batch = json.loads(line)
        if weights not in engines:
            engines[weights] = LLM(embedded_target(), embedded_draft(), weights=weights, prefix_cache=False)
        asked = SpeculationParams(mode=modes(way), num_draft_tokens=NUM_DRAFT if way == "fixed" else None)
        start = time.perf_counter()
        engines[weights].generate(texts[:batch], SamplingParams(max_tokens=TOKENS, ignore_eos=True), speculation=asked)
        print(time.perf_counter() - start, flush=True)


def rows(old: Checkout, new: Checkout, rounds: int) -> Iterator[tuple[str, list[float], float, float]]:
    """Yield for each configuration: its name, the speed ratios, and both medians in milliseconds."""
    for case in product(WEIGHTS, WAYS, BATCHES):
        taken: dict[Checkout, list[float]] = {old: [], new: []}
        for i in range(rounds + 1):
            for checkout in (old, new) if i % 2 else (new, old):
                seconds = checkout.seconds(*case)
                if i:  # the first round warms up
                    taken[checkout].append(seconds)
        ratios = [a / b for a, b in zip(taken[old], taken[new], strict=True)]
        before, after = (1000 * statistics.median(taken[checkout]) for checkout in (old, new))
        yield f"{case[0]}, {case[1]}, batch {case[2]}", ratios, before, after


def main(arguments: Sequence[str]) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--rounds", type=int, default=25)
    asked = parser.parse_args(arguments)
    print("| what | new over old | smallest | largest | old, ms | new, ms |\n|---|---|---|---|---|---|")
    with ExitStack() as exits:
        old, new = (Checkout(folder.resolve(), exits) for folder in (asked.old, asked.new))
        for name, ratios, before, after in rows(old, new, asked.rounds):
            middle = statistics.median(ratios)
            print(
                f"| {name} | {middle:.3f} | {min(ratios):.2f} | {max(ratios):.2f} | {before:.0f} | {after:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        serve()
    else:
        main(sys.argv[1:])
