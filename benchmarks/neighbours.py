"""Tokens per second beside other busy programs: with the default choice of threads, and with fixed numbers of them.

    python -m benchmarks.neighbours                          the embedded pair
    python -m benchmarks.neighbours --pair 1.1b              random weights, created on the first run, in int8
    python -m benchmarks.neighbours --most 4 --fixed 1 2 4   more threads than cores

A neighbour is a process that computes and never waits. The numbers of neighbours take turns, and for each of them all
ways take turns, round after round, because a shared machine's speed drifts by more than the ways differ. `others'
cores` is the processor use of all other processes meanwhile, including neighbours. `ratio` is the default relative to
the best fixed number. The script only prints the table and writes no file.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path

from benchmarks.harness.busy import neighbours
from benchmarks.harness.machine import machine
from benchmarks.harness.subject import Subject, load_pair
from benchmarks.harness.timing import AUTO, run_turn, way
from benchmarks.harness.turns import Turn, median_speed, ratios
from engine.config import EngineConfig
from engine.engine import Engine
from engine.machine.threads import cores, exactly, leave_to_pool, use_threads
from engine.startup.build import assemble

DEFAULT = "default"


def load_engines(config: EngineConfig, names: Sequence[str]) -> dict[str, Engine]:
    """Create one engine per name over the same weights; each engine learns its own costs."""
    pair = load_pair(config)
    return {name: assemble(config, *pair) for name in names}


@contextmanager
def fixed(threads: int) -> Iterator[None]:
    """Run the C kernels with exactly this number of threads; torch uses one, as with the default."""
    with exactly(threads):
        leave_to_pool()
        yield


def measure(
    engines: dict[str, Engine], prompts: Sequence[tuple[int, ...]], k: int | str, options: argparse.Namespace
) -> dict[int, dict[str, list[Turn]]]:
    """Measure the turns by neighbours and way; an uncounted turn of the default precedes each group."""
    ways: dict[str, Callable[[], AbstractContextManager[None]]] = {DEFAULT: nullcontext}
    ways |= {str(n): partial(fixed, n) for n in options.fixed}
    found: dict[int, dict[str, list[Turn]]] = {n: {name: [] for name in ways} for n in options.neighbours}

    def go(name: str) -> Turn:
        with ways[name]():
            return run_turn(engines[name], prompts, options.tokens, way(k))

    for name in ways:
        go(name)
    for number in range(options.rounds):
        for count, turns in found.items():
            with neighbours(count):
                go(DEFAULT)
                for turn in range(options.turns):
                    for name in list(ways)[:: -1 if (number + turn) % 2 else 1]:
                        turns[name].append(go(name))
    return found


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pair", choices=["embedded", "1.1b", "160m"], default="embedded")
    parser.add_argument("--dtype", default="float32", help="of the embedded pair")
    parser.add_argument("--models", type=Path, default=Path("build/benchmarks"), help="where synthetic models are kept")
    parser.add_argument("--most", type=int, default=None, help="threads of the default; else the cores there are")
    parser.add_argument("--fixed", type=int, nargs="+", default=[*range(1, cores() + 1)], help="numbers beside it")
    parser.add_argument("--neighbours", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--drafts", nargs="+", default=["0", AUTO], help="0 is plain decoding")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turns", type=int, default=4, help="of each way in a round, under the same conditions")
    parser.add_argument("--tokens", type=int, default=32, help="of a turn")
    options = parser.parse_args()
    threads = use_threads(options.most)
    if options.pair == "embedded":
        subject = Subject.embedded(16)
        config = subject.config(dtype=options.dtype, device="cpu")
    else:
        subject = Subject.synthetic(options.models, options.pair, "160m", 0.8, 16)
        config = subject.config(kv_memory=0.5, device="cpu")
    numbers = [str(n) for n in options.fixed]
    told = machine()
    size = f"{options.rounds} rounds of {options.turns} turns of {options.tokens} tokens, tokens/s"
    print(
        f"{told['machine']}; {told['versions']}; commit {told['commit']}; {options.pair},",
        f"at most {threads} threads, {size}\n",
    )
    print(
        "| "
        + " | ".join(["drafts", "batch", "neighbours", "others' cores", DEFAULT, *numbers, "ratio", "range"])
        + " |"
    )
    print("|" + "---|" * (7 + len(numbers)))
    for k in options.drafts:
        for batch in options.batches:
            engines = load_engines(config, [DEFAULT, *numbers])
            found = measure(engines, subject.prompts[:batch], k if k == AUTO else int(k), options)
            for count, turns in found.items():
                best = max(numbers, key=lambda name: median_speed(turns[name]))
                gains = ratios(turns[DEFAULT], turns[best])
                speeds = " | ".join(f"{median_speed(turns[name]):.1f}" for name in (DEFAULT, *numbers))
                shown = f"{statistics.median(gains):.2f} | {min(gains):.2f} to {max(gains):.2f}"
                others = statistics.median(turn.foreign for way_turns in turns.values() for turn in way_turns)
                print(f"| {k} | {batch} | {count} | {others:.1f} | {speeds} | {shown} |", flush=True)


if __name__ == "__main__":
    main()
