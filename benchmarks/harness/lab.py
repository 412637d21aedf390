"""What all sections of `make bench` share: the options, the synthetic pair, engines, and what a section is."""

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
from engine.config import EngineConfig
from engine.engine import Engine
from engine.params import MAX_NUM_DRAFT

Row = dict[str, Any]  # of a table: what JSON can hold


@dataclass(frozen=True)
class Section:
    """One question: how it is measured, and how what was found is shown."""

    name: str
    title: str
    measure: Callable[[Lab], list[Row]]
    explain: str  # what the columns are
    columns: Mapping[str, str]  # heading -> format of it, such as "{gain:.2f}"
    plot: Callable[[Sequence[Row], Path], Sequence[str]] = lambda _rows, _folder: ()  # writes PNGs, names them
    verdict: Callable[[Sequence[Row]], Sequence[str]] = lambda _rows: ()  # sentences over the table
    page: str = "cpu"  # on which it is shown
    subject: str | None = None  # what is measured, where that is not the synthetic pair


@dataclass(frozen=True)
class BenchOptions:
    """How much is measured; the same for all sections, which take what concerns them."""

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
    streams: tuple[int, ...] | None = None
    peers: tuple[str, ...] | None = None
    peers_python: tuple[str, ...] = ()
    neighbours: tuple[int, ...] = (0,)


@dataclass
class Lab:
    """Options, and what is made of them once."""

    options: BenchOptions
    tell: Callable[[str], None] = lambda text: print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)
    script: Script = field(default_factory=Script)

    @cached_property
    def pair(self) -> SyntheticPair:
        """On disk; the first time takes half a minute."""
        wanted = self.options
        self.tell(f"weights of {wanted.target} and {wanted.draft} in {wanted.models}")
        return SyntheticPair.make(wanted.models, wanted.target, wanted.draft, wanted.agreement)

    @property
    def config(self) -> EngineConfig:
        """Of our engine, as the server would have it; every section says what else it wants."""
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
        """In int8, loaded once."""
        return ReplayModels(self.config, self.script)

    def drafts(self, default: Sequence[int]) -> list[int]:
        """The numbers of drafts to compare with plain decoding: those asked for, or the section's."""
        return [k for k in self.options.drafts or default if k]

    def engine(self, batch: int, context: int) -> Engine:
        """For so many sequences with prompts of `context` tokens."""
        return self.models.engine(batch, min(POSITIONS, context + self.options.tokens + 32))

    def engines(self, batch: int, context: int, drafts: Sequence[int]) -> dict[str, Engine]:
        """One for plain decoding, for each number of drafts (those asked for, or these), and for AUTO, named so."""
        return {name: self.engine(batch, context) for name in ("0", *map(str, self.drafts(drafts)), AUTO)}

    def prompts(self, batch: int, context: int) -> list[tuple[int, ...]]:
        """Their continuations are recorded for drafts to know."""
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
        """Some requests before their first step: `most` tokens or as many as the options say.

        Drafts have this acceptance, which is that of whatever else is under way.
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
        """A batch alone.

        Raises:
            RuntimeError: the tokens are not the rule's.
        """
        return self.abreast({str(k): self.batch(engine, prompts, k, rate, salt, most)}, prompts)[str(k)]

    def abreast(self, batches: Mapping[str, Batch], prompts: Sequence[tuple[int, ...]]) -> dict[str, Turn]:
        """Batches of the same prompts, each on an engine of its own.

        Raises:
            RuntimeError: the tokens are not the rule's.
        """
        turns = abreast(batches)
        for name, turn in turns.items():
            if turn.tokens != [self.pair.rule.text(prompt[-1], batches[name].num_tokens) for prompt in prompts]:
                raise RuntimeError(f"K={name} gave other tokens than the rule that is planted in the weights")
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
        """Engines abreast, each named by its number of drafts, after a round that does not count.

        Those whose speed in that one is below `hopeless` times the best one's have no turns, plain and AUTO excepted.
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
    """What the turns of one way come to, beside those of another in the same rounds."""
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
