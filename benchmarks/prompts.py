"""AUTO against plain decoding and fixed numbers of drafts, text by text: real prompts and one stream.

    python -m benchmarks.prompts                          48 texts; --skip, --prompts and --join measure in slices
    python -m benchmarks.prompts --fresh --prompts 10     each the first request of a new engine, which starts without
                                                          costs (auto) or with the saved ones (auto again)
    python -m benchmarks.prompts --fresh --agreement 0.6  the same with 1.1B and 160M, random weights in int8

A text of the embedded pair is a function of held-out modules. Texts alternate between greedy decoding and temperature
0.6. All ways decode a text at the same time: the next step belongs to the way with the least time so far. Each way has
its own engine, and none finds a prompt in its cache. Seconds are processor seconds. The run stops if the ways give
different tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import count, takewhile
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

from rich.progress import track

from benchmarks.harness.machine import machine
from benchmarks.harness.subject import Subject, load_pair
from benchmarks.harness.timing import AUTO, Batch, abreast, way
from engine.config import EngineConfig
from engine.engine import Engine
from engine.machine.threads import use_threads
from engine.params import SamplingParams
from engine.startup.build import assemble
from engine.startup.warm import make_ready
from server.worker.garbage import freeze_loaded

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TEMPERATURES = (0.0, 0.6)
AGAIN = "auto again"
_salts = count()


@dataclass(frozen=True)
class Text:
    """Results of each way on one text: tokens per second of the whole request, and accepted drafts."""

    number: int
    temperature: float
    speeds: Mapping[str, float]
    accepted: Mapping[str, int]

    def gain(self, name: str) -> float:
        """Return the speed-up over plain decoding."""
        return self.speeds[name] / self.speeds["0"]

    @property
    def against_better(self) -> float:
        """Return the speed of AUTO relative to the better of plain decoding and K=4."""
        return self.speeds[AUTO] / max(self.speeds["0"], self.speeds["4"])


@dataclass(frozen=True)
class PromptPair:
    """A pair that is loaded once, and its prompts."""

    options: argparse.Namespace

    @cached_property
    def subject(self) -> Subject:
        """Return the embedded pair, or a synthetic pair with the requested acceptance."""
        count, rate = self.options.skip + self.options.prompts, self.options.agreement
        if rate is None:
            return Subject.embedded(count)
        return Subject.synthetic(self.options.models, "1.1b", "160m", rate, count)

    @cached_property
    def config(self) -> EngineConfig:
        """Return the server's configuration with one thread and the requested number of drafts."""
        most = {} if self.options.most is None else {"num_draft_tokens": self.options.most}
        return self.subject.config(kv_memory=0.25, threads=1, **most)

    @cached_property
    def models(self) -> tuple[PreTrainedModel, PreTrainedModel]:
        """Return target and draft."""
        use_threads(1)
        return load_pair(self.config)

    def engine(self, seconds: float, *, uses_saved_calibration: bool = False) -> Engine:
        """Return an engine that is ready, after calibration of this many seconds."""
        engine = assemble(self.config, *self.models)
        make_ready(engine, seconds, uses_saved_calibration=uses_saved_calibration)
        return engine

    def batch(self, engine: Engine, name: str, number: int, prompt: tuple[int, ...]) -> Batch:
        """Return one request before its first step. It has its own salt, so that it finds nothing in a cache."""
        sampling = SamplingParams(temperature=temperature_of(number), seed=number, max_tokens=self.options.tokens)
        speculation = way(AUTO if name in (AUTO, AGAIN) else int(name), most=self.config.num_draft_tokens)
        return Batch(
            engine, [prompt], self.options.tokens, speculation, f"text-{next(_salts)}", sampling, time.process_time
        )

    def text(self, engines: Mapping[str, Engine], number: int, prompt: tuple[int, ...]) -> Text:
        """Run all ways concurrently, started in an order that differs from text to text.

        Raises:
            RuntimeError: A way gave other tokens than plain decoding.
        """
        names = list(engines)
        random.Random(number).shuffle(names)  # noqa: S311 - an order, no secret
        turns = abreast({name: self.batch(engines[name], name, number, prompt) for name in names})
        for name, turn in turns.items():
            if turn.tokens != turns["0"].tokens:
                raise RuntimeError(f"text {number}: K={name} gave other tokens than plain decoding")
        speeds = {name: turns[name].whole_speed for name in engines}
        return Text(number, temperature_of(number), speeds, {name: turns[name].accepted for name in engines})


def temperature_of(number: int) -> float:
    """Return the temperature of this text; the temperatures alternate."""
    return TEMPERATURES[number % len(TEMPERATURES)]


def within(options: argparse.Namespace, numbers: Iterable[int]) -> Iterator[int]:
    """Yield the numbers until the time limit has passed."""
    end = time.monotonic() + options.seconds
    yield from takewhile(lambda _: time.monotonic() < end, track(list(numbers), "texts"))


def measure(options: argparse.Namespace) -> list[Text]:
    """Measure texts one after another; every engine is warm, and AUTO continues to learn from text to text."""
    pair = PromptPair(options)
    numbers = range(options.skip, options.skip + options.prompts)
    seconds = pair.config.warm_up_seconds
    engines = {name: pair.engine(seconds if name == AUTO else 0.0) for name in ("0", *options.fixed, AUTO)}
    freeze_loaded()  # as in a server: a full collection takes as long as half a text and would slow one way only
    return [pair.text(engines, n, pair.subject.prompts[n]) for n in within(options, numbers)]


def measure_fresh(options: argparse.Namespace) -> list[Text]:
    """Measure each text as the first request of two new engines: without calibration data, and with the first one's."""
    pair, texts = PromptPair(options), list[Text]()
    numbers = range(options.skip, options.skip + options.prompts)
    seconds = pair.config.warm_up_seconds
    fixed = {name: pair.engine(0.0) for name in ("0", *options.fixed)}
    for n in within(options, numbers):
        with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, PILOTFISH_CACHE=folder):
            fresh = {name: pair.engine(seconds, uses_saved_calibration=True) for name in (AUTO, AGAIN)}
        texts.append(pair.text(fixed | fresh, n, pair.subject.prompts[n]))
    return texts


def report(texts: Sequence[Text]) -> str:
    """Return a row per text, and a summary."""
    names = list(texts[0].speeds)
    lines = [
        f"| text | temperature | {' | '.join(f'K={name}' for name in names)} | AUTO / the better | accepted |",
        "|---|---|" + "---|" * (len(names) + 2),
    ]
    for text in texts:
        speeds = " | ".join(f"{text.speeds[name]:.0f}" for name in names)
        kept = f"{text.accepted[AUTO]} of {text.accepted['4']}"
        lines.append(f"| {text.number} | {text.temperature} | {speeds} | {text.against_better:.2f} | {kept} |")
    return "\n".join([*lines, "", *summary(texts)])


def summary(texts: Sequence[Text]) -> Iterable[str]:
    """Yield means over the texts, the worst ones, and the number of texts for which AUTO stopped drafting."""
    names = [name for name in texts[0].speeds if name != "0"]
    gains = {name: statistics.fmean(text.gain(name) for text in texts) for name in names}
    fixed = {name: gain for name, gain in gains.items() if name not in (AUTO, AGAIN)}
    best = max(fixed, key=lambda name: fixed[name])
    ratios = sorted(text.against_better for text in texts)
    given_up = sum(not text.accepted[AUTO] and text.accepted["4"] > 0 for text in texts)
    yield f"{len(texts)} texts. Mean gain over plain decoding: " + ", ".join(f"K={n} {g:.3f}" for n, g in gains.items())
    for name in (AUTO, AGAIN):
        if name in gains:
            yield f"{name} over the best fixed number (K={best}): {gains[name] / fixed[best]:.3f}"
    yield f"AUTO over the better of plain and K=4: median {statistics.median(ratios):.3f}, worst {ratios[0]:.2f}"
    yield f"texts below 0.9 of it: {sum(ratio < 0.9 for ratio in ratios)}"
    yield f"texts without an accepted draft where K=4 has some: {given_up}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the report, and store the measurements."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.prompts", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--fresh", action="store_true", help="a fresh engine for each text; --tokens 96 is usual")
    parser.add_argument("--skip", type=int, default=0, help="leave out so many of the list's first")
    parser.add_argument("--tokens", type=int, default=112)
    parser.add_argument("--seconds", type=float, default=inf, help="begin no text after so many seconds")
    parser.add_argument("--fixed", nargs="+", default=["4", "8"], help="numbers of drafts; 4 is always among them")
    parser.add_argument("--agreement", type=float, help="a pair of 1.1B and 160M in int8, its draft right so often")
    parser.add_argument("--models", type=Path, default=Path("build/benchmarks"), help="where such pairs are kept")
    parser.add_argument("--most", type=int, help="most drafts of AUTO; default the engine's")
    parser.add_argument("--out", type=Path, help="what was measured, as JSON")
    parser.add_argument("--join", type=Path, nargs="+", default=[], help="add texts of earlier slices to the report")
    options = parser.parse_args(arguments)
    options.fixed = sorted({"4", *options.fixed}, key=int)
    texts = (measure_fresh if options.fresh else measure)(options) if options.prompts else []
    if options.out is not None:
        options.out.write_text(json.dumps({**machine(), "texts": [asdict(text) for text in texts]}, indent=1) + "\n")
    for path in options.join:
        texts += [Text(**text) for text in json.loads(path.read_text())["texts"]]
    print("; ".join(machine().values()), "", report(sorted(texts, key=lambda text: text.number)), sep="\n")


if __name__ == "__main__":
    main()
