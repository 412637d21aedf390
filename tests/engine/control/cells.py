"""All cells of the virtual clock: `python -m tests.engine.control.cells --seeds 10 --keep new.json --against old.json`.

Speed of AUTO over that of plain decoding, in tokens per second of true time: every machine at every batch, acceptance
and context (`clockwork`), loads and texts that change, and texts with several proposers (`crossroads`).
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tests.clockwork import COSTS, Machine
from tests.crossroads import Crossroads
from tests.engine.control.test_candidates import TEXTS
from tests.engine.control.test_control import ACCEPTANCES, BATCHES, CONTEXTS, GPU, INT8, SLOW_READER, SMALL

Cell = tuple[str, str, float]  # group, name, speed over plain decoding


def warm(*args: object, **settings: object) -> Machine:
    machine = Machine(*args, **settings)
    machine.warm_up()
    return machine


def grid(seed: int) -> Iterator[Cell]:
    """A server just started, and the same server later. Batches of 32 with long prompts take long to simulate."""
    for costs in COSTS:
        for batch in BATCHES:
            for acceptance in ACCEPTANCES:
                for context in CONTEXTS if batch < 32 or acceptance in (0, 0.9) else CONTEXTS[:1]:
                    machine = warm(COSTS[costs], batch=batch, acceptance=acceptance, prompt=context, seed=seed)
                    name = f"{costs}, batch {batch}, acceptance {acceptance}, context {context}"
                    yield "first 200 steps", name, machine.run(200).against_plain
                    yield "next 120 steps", name, machine.run(120).against_plain


def changes(seed: int) -> Iterator[Cell]:
    machine = warm(COSTS[INT8], batch=1, acceptance=0.6, prompt=64, seed=seed)
    for i, batch in enumerate((1, 32, 1)):
        machine.batch = batch
        machine.run(150)
        yield "load changes", f"{i}: batch {batch}", machine.run(100).against_plain
    for costs in (INT8, SMALL, GPU):
        for batch in (1, 4):
            machine = warm(COSTS[costs], batch=batch, acceptance=0.9, prompt=64, seed=seed)
            machine.run(100)
            for acceptance, runs in ((0.0, (100, 200)), (0.9, (200, 200, 100))):
                machine.acceptance = acceptance
                for i, steps in enumerate(runs):
                    name = f"{costs}, batch {batch}, {i}"
                    yield f"acceptance becomes {acceptance}", name, machine.run(steps).against_plain
    machine = warm(SLOW_READER, batch=1, acceptance=0.0, prompt=1024, seed=seed)
    for i, steps in enumerate((1500, 1500, 1000)):
        machine.acceptance = 0.9 if i else 0.0
        yield f"slow reader {i}", "", machine.run(steps).against_plain
    for acceptance, hits in ((0.8, 0.25), (0.0, 0.5)):
        machine = warm(COSTS[INT8], batch=8, acceptance=acceptance, hits=hits, prompt=64, looks_up=True, seed=seed)
        machine.run(200)
        yield "lookups", f"{acceptance}, {hits}", machine.run(120).against_plain


def proposers(seed: int) -> Iterator[Cell]:
    for text, law in TEXTS.items():
        for costs, batch in ((INT8, 1), (INT8, 4), (SMALL, 1), (GPU, 1)):
            machine = Crossroads(COSTS[costs], law, batch=batch, seed=seed)
            for part, steps in (("first 80 steps", 80), ("next 160 steps", 160)):
                yield f"auto, {part}", f"{text}, {costs}, batch {batch}", machine.rate(steps)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--against", type=Path)
    options = parser.parse_args()
    found = defaultdict[str, list[float]](list)
    for seed in range(options.seeds):
        for part in (grid, changes, proposers):
            for group, name, speed in part(seed):
                found[f"{group}: {name}"].append(speed)
    if options.keep:
        options.keep.write_text(json.dumps(found))
    before = json.loads(options.against.read_text()) if options.against else found
    groups = defaultdict[str, list[tuple[float, float]]](list)
    for cell, speeds in found.items():
        groups[cell.split(":")[0]].append((float(np.mean(before[cell])), float(np.mean(speeds))))
    for group, pairs in groups.items():
        old, new = np.exp(np.log(np.array(pairs)).mean(0))
        slowest = [min(one) for one in zip(*pairs, strict=True)]
        print(f"{group:25} mean {old:.3f} -> {new:.3f}, slowest cell {slowest[0]:.3f} -> {slowest[1]:.3f}")


if __name__ == "__main__":
    main()
