"""Predicted outputs: the same requests with predictions that are right, edited, wrong, and without one.

    python -m benchmarks.predictions                         24 texts of the embedded pair
    python -m benchmarks.predictions --agreement 0.6         1.1B and 160M, random weights in int8

What is predicted is derived from what the model writes: `right` is that itself, `edited` has a token replaced, three
inserted and five deleted in every 60, of `nine of ten` every tenth token is another one, `wrong` is the output of
another text, and `unlike` random tokens. All ways decode a text at the same time, each in an engine of its own with
AUTO; the next step belongs to the way with the least time so far. Seconds are processor seconds of one thread.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path

from rich.progress import track

from benchmarks.harness.machine import machine
from benchmarks.harness.subject import Subject, load_pair
from benchmarks.harness.timing import Batch, abreast
from benchmarks.harness.turns import Turn
from engine.engine import Engine
from engine.machine.threads import use_threads
from engine.params import SamplingParams, SpeculationMode, SpeculationParams
from engine.startup.build import assemble
from engine.startup.warm import make_ready
from server.worker.garbage import freeze_loaded

PLAIN, NONE = "plain", "none"
TEMPERATURE = 0.6
_salts = count()


def predictions(written: Sequence[int], other: Sequence[int], vocab: int, seed: int) -> dict[str, tuple[int, ...]]:
    """Return what is predicted of an output that will be `written`, by the name of the way."""
    rng = random.Random(seed)  # noqa: S311 - a sample, no secret
    edited = list[int]()
    for start in range(0, len(written), 60):
        part = list(written[start : start + 60])
        part[10:11] = [rng.randrange(vocab)]
        part[25:25] = [rng.randrange(vocab) for _ in range(3)]
        del part[40:45]
        edited += part
    return {
        "right": tuple(written),
        "edited": tuple(edited),
        "nine of ten": tuple(rng.randrange(vocab) if i % 10 == 9 else token for i, token in enumerate(written)),
        "wrong": tuple(other),
        "unlike": tuple(rng.randrange(vocab) for _ in written),
    }


class PredictionBench:
    """A pair that is loaded once, with an engine for each way."""

    def __init__(self, options: argparse.Namespace) -> None:
        use_threads(1)
        rate, self._tokens = options.agreement, options.tokens
        embedded = rate is None
        self.subject = (
            Subject.embedded(options.texts)
            if embedded
            else Subject.synthetic(options.models, "1.1b", "160m", rate, options.texts)
        )
        self._config = self.subject.config(kv_memory=0.25, threads=1)
        self._models = load_pair(self._config)
        self._engines = {name: self._engine() for name in (PLAIN, NONE, *predictions((), (), 1, 0))}
        self._room = self._engines[PLAIN].max_model_len - self._tokens  # for prompts, of which the end is kept
        freeze_loaded()

    def _engine(self) -> Engine:
        engine = assemble(self._config, *self._models)
        make_ready(engine, self._config.warm_up_seconds, uses_saved_calibration=False)
        return engine

    def written(self, number: int) -> list[int]:
        """Return what the model writes after a prompt."""
        batch = self._batch(NONE, number)
        return abreast({"": batch})[""].tokens[0]

    def turns(self, number: int, predicted: Mapping[str, tuple[int, ...]]) -> dict[str, Turn]:
        """Decode a text in all ways at the same time. Raises RuntimeError if one gives other tokens."""
        names = list(self._engines)
        random.Random(number).shuffle(names)  # noqa: S311 - an order, no secret
        turns = abreast({name: self._batch(name, number, predicted.get(name, ())) for name in names})
        for name, turn in turns.items():
            if turn.tokens != turns[PLAIN].tokens:
                raise RuntimeError(f"text {number}: {name} gave other tokens than plain decoding")
        return turns

    def _batch(self, name: str, number: int, prediction: tuple[int, ...] = ()) -> Batch:
        mode = SpeculationMode.OFF if name == PLAIN else SpeculationMode.AUTO
        sampling = SamplingParams(temperature=TEMPERATURE, seed=number, max_tokens=self._tokens)
        prompt, speculation = self.subject.prompts[number][-self._room :], SpeculationParams(mode=mode)
        return Batch(
            self._engines[name], [prompt], self._tokens, speculation, f"text-{next(_salts)}", sampling,
            time.process_time, prediction,
        )  # fmt: skip

    @property
    def vocab(self) -> int:
        """Return the width of the target's logits."""
        return self._engines[PLAIN].vocab_size


def measure(options: argparse.Namespace) -> list[dict[str, Turn]]:
    """Measure texts one after another; the engines are warm, and AUTO continues to learn from text to text."""
    bench = PredictionBench(options)
    written = [bench.written(number) for number in range(options.texts)]
    return [
        bench.turns(n, predictions(written[n], written[n - 1], bench.vocab, n))
        for n in track(range(options.texts), "texts")
    ]


def report(texts: Sequence[Mapping[str, Turn]]) -> Iterator[str]:
    """Yield a row per way: seconds and passes of the target relative to no prediction and to plain decoding."""
    yield "| prediction | passes per token | speed over plain | speed over none: median | worst | best |"
    yield "|---|---|---|---|---|---|"
    for name in texts[0]:
        passes = statistics.fmean(passes_of(text[name]) for text in texts)
        over_plain = statistics.median(text[name].whole_speed / text[PLAIN].whole_speed for text in texts)
        over_none = sorted(text[name].whole_speed / text[NONE].whole_speed for text in texts)
        cells = [f"{passes:.3f}", f"{over_plain:.2f}", f"{statistics.median(over_none):.3f}"]
        yield f"| {name} | {' | '.join([*cells, f'{over_none[0]:.2f}', f'{over_none[-1]:.2f}'])} |"


def passes_of(turn: Turn) -> float:
    """Return passes of the target per token."""
    return len(turn.verify_seconds) / len(turn.tokens[0])


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print the report."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.predictions",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--texts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=240)
    parser.add_argument("--agreement", type=float, help="a pair of 1.1B and 160M in int8, its draft right so often")
    parser.add_argument("--models", type=Path, default=Path("build/benchmarks"), help="where such pairs are kept")
    print("; ".join(machine().values()), "", *report(measure(parser.parse_args(arguments))), sep="\n")


if __name__ == "__main__":
    main()
