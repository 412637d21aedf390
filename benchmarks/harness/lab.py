"""Shared parts of all sections of `make bench`: the options, the synthetic pair, engines, and the class `Section`."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.harness.replay import NAME, ReplayModels, Script
from benchmarks.harness.synthetic import POSITIONS, SyntheticPair, int8_of
from benchmarks.harness.timing import AUTO, Batch, abreast, way
from benchmarks.harness.turns import Turn, foreign, median_speed, promising, ratios
from pilotfish.engine.config import EngineConfig
from pilotfish.engine.engine import Engine
from pilotfish.engine.params import MAX_NUM_DRAFT

Row = dict[str, Any]  # of a table; values that JSON supports


@dataclass(frozen=True)
class Section:
    """One question: how to measure it, and how to show the results."""

    name: str
    title: str
    measure: Callable[[Lab], list[Row]]
    explain: str  # what the columns mean
    columns: Mapping[str, str]  # heading -> format of its cells, such as "{gain:.2f}"
    plot: Callable[[Sequence[Row], Path], Sequence[str]] = lambda _rows, _folder: ()  # writes PNGs, returns their names
    verdict: Callable[[Sequence[Row]], Sequence[str]] = lambda _rows: ()  # sentences about the table


@dataclass(frozen=True)
class BenchOptions:
    """The amount of measurements; the same for all sections, each of which reads the options it needs."""

    models: Path = Path("build/benchmarks")
    target: str = "1.1b"
    draft: str = "160m"
    agreement: float = 0.8
    threads: int | None = None
    rounds: int = 5
    prompt: int = 64
    tokens: int = 64
    batches: tuple[int, ...] | None = None
    rates: tuple[float, ...] | None = None
    contexts: tuple[int, ...] | None = None
    drafts: tuple[int, ...] | None = None
    kv_memory: float = 6.0
    peers: tuple[str, ...] | None = None
    peers_python: tuple[str, ...] = ()
    neighbours: tuple[int, ...] = (0,)


@dataclass
class Lab:
    """The options, and objects that are created once from them."""

    options: BenchOptions
    tell: Callable[[str], None] = lambda text: print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)
    script: Script = field(default_factory=Script)

    @cached_property
    def pair(self) -> SyntheticPair:
        """Return the pair on disk; creating it takes half a minute the first time."""
        wanted = self.options
        self.tell(f"weights of {wanted.target} and {wanted.draft} in {wanted.models}")
        return SyntheticPair.make(wanted.models, wanted.target, wanted.draft, wanted.agreement)

    @property
    def config(self) -> EngineConfig:
        """Return the configuration of our engine, as in the server; sections override what they need."""
        settings = {
            "target": str(int8_of(self.pair.target)),
            "draft": str(int8_of(self.pair.draft)),
            "dtype": "bfloat16",
            "threads": self.options.threads,
            "num_draft_tokens": MAX_NUM_DRAFT,
            "kv_memory": self.options.kv_memory,
            "proposer": NAME,
        }
        return EngineConfig.model_validate(settings)

    @cached_property
    def models(self) -> ReplayModels:
        """Return the models in int8, loaded once."""
        return ReplayModels(self.config, self.script)

    def drafts(self, default: Sequence[int]) -> list[int]:
        """Return the numbers of drafts to compare with plain decoding: those of the options, or the default."""
        return [k for k in self.options.drafts or default if k]

    def engine(self, batch: int, context: int) -> Engine:
        """Return an engine for `batch` sequences with prompts of `context` tokens."""
        return self.models.engine(batch, min(POSITIONS, context + self.options.tokens + 32))

    def engines(self, batch: int, context: int, drafts: Sequence[int]) -> dict[str, Engine]:
        """Return engines by name: plain decoding, each number of drafts (of the options, or these), and AUTO."""
        return {name: self.engine(batch, context) for name in ("0", *map(str, self.drafts(drafts)), AUTO)}

    def prompts(self, batch: int, context: int) -> list[tuple[int, ...]]:
        """Return prompts, after recording their continuations for the replayed drafts."""
        prompts = self.pair.rule.prompts(batch, context, seed=context)
        for prompt in prompts:
            self.script.record(prompt, self.pair.rule.text(prompt[-1], self.options.tokens))
        return prompts

    def batch(
        self,
        engine: Engine,
        prompts: Sequence[tuple[int, ...]],
        k: int | str,
        rate: float = 0.0,
        salt: str | None = None,
        most: int | None = None,
    ) -> Batch:
        """Return a batch before its first step, with at most `most` tokens, or as many as the options specify.

        The acceptance `rate` of the drafts also applies to all other batches that are running.
        """
        self.script.rate = rate
        tokens = min(self.options.tokens, most or self.options.tokens)
        return Batch(engine, prompts, tokens, way(k, NAME if k else None), salt)

    def turn(
        self,
        engine: Engine,
        prompts: Sequence[tuple[int, ...]],
        k: int | str,
        rate: float = 0.0,
        salt: str | None = None,
        most: int | None = None,
    ) -> Turn:
        """Run one batch alone.

        Raises:
            RuntimeError: The tokens differ from the rule's.
        """
        return self.abreast({str(k): self.batch(engine, prompts, k, rate, salt, most)}, prompts)[str(k)]

    def abreast(self, batches: Mapping[str, Batch], prompts: Sequence[tuple[int, ...]]) -> dict[str, Turn]:
        """Run batches of the same prompts concurrently, each on its own engine.

        Raises:
            RuntimeError: The tokens differ from the rule's.
        """
        turns = abreast(batches)
        for name, turn in turns.items():
            if turn.tokens != [self.pair.rule.text(prompt[-1], batches[name].num_tokens) for prompt in prompts]:
                raise RuntimeError(f"K={name} returned other tokens than the rule in the weights")
        return turns

    def rounds(
        self,
        engines: Mapping[str, Engine],
        prompts: Sequence[tuple[int, ...]],
        rate: float,
        tell: Callable[[str], None],
        salt: str | None = None,
        hopeless: float = 0.0,
    ) -> dict[str, list[Turn]]:
        """Run engines concurrently, each named by its number of drafts, after a round that is not counted.

        An engine slower in that round than `hopeless` times the best one gets no turns. Plain and AUTO always do.
        """

        def go(names: Iterable[str]) -> dict[str, Turn]:
            ways = {name: name if name == AUTO else int(name) for name in names}
            return self.abreast({n: self.batch(engines[n], prompts, k, rate, salt) for n, k in ways.items()}, prompts)

        left = promising(go(engines), hopeless, ("0", AUTO))
        turns: dict[str, list[Turn]] = {name: [] for name in left}
        for number in range(self.options.rounds):
            for name, turn in go(left).items():
                turns[name].append(turn)
                tell(f"round {number + 1}, {name}: {turn.speed:.1f} tokens/s")
        return turns


def row_of(turns: Sequence[Turn], base: Sequence[Turn], **labels: Any) -> Row:
    """Summarise the turns of one way, relative to the turns of another way in the same rounds."""
    gains, whole = ratios(turns, base), ratios(turns, base, whole=True)
    return {
        **labels,
        "tokens_per_second": median_speed(turns),
        "acceptance_rate": turns[-1].acceptance_rate,
        "gain": statistics.median(gains),
        "gains": gains,
        "whole_gain": statistics.median(whole),
        "foreign": foreign(turns),
    }
