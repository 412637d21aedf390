"""`pilotfish bench`: measures the speed-up of speculation on this machine. Contains no tensor code.

Each round runs plain decoding, a fixed number of drafts and AUTO with every batch size, because the speed of a shared
machine changes from minute to minute. The result is the median over rounds of the ratio within a round. A trial with
few tokens comes first; from its speed follow the number of tokens and rounds that fit into the time.
"""

from __future__ import annotations

import json
import statistics
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from pilotfish.engine.errors import ModelError
from pilotfish.engine.params import SamplingParams, SpeculationMode, SpeculationParams
from pilotfish.models import corpus
from pilotfish.server.commands.arguments import Tokens, at_least
from pilotfish.server.commands.progress import Progress, Stopped, TimeBudget
from pilotfish.server.config import ServerConfig

if TYPE_CHECKING:
    from pilotfish.engine.engine import Engine
    from pilotfish.engine.llm import LLM, CompletionOutput
    from pilotfish.engine.text.codec import Codec

ERRORS = (ValidationError, ModelError, OSError)
WAYS = (SpeculationMode.OFF, SpeculationMode.FIXED, SpeculationMode.AUTO)
_PROMPT = 64  # maximum tokens of a prompt, of which the last are kept: decoding is measured
_TRIAL = 8  # tokens of an output in the trial
_TRIAL_SHARE = 0.8  # of the time, in which the trial of another batch size must end
_SHORTEST = 32  # tokens of an output, below which fewer rounds are preferred to shorter outputs
_salts = count()

_ABOUT = """Measure the speed-up of speculation on this machine. Accepts the options, variables and file of `serve`."""

OPTIONS: dict[str, dict[str, Any]] = {
    "seconds": {"type": at_least(1), "default": 45, "help": "time for loading and measuring (default: %(default)s)"},
    "tokens": {
        "type": at_least(1),
        "default": 64,
        "help": "maximum number of tokens per output (default: %(default)s)",
    },
    "rounds": {"type": at_least(1), "default": 3, "help": "maximum number of rounds (default: %(default)s)"},
    "batches": {"type": at_least(1), "nargs": "+", "default": [1, 8], "help": "batch sizes (default: 1 8)"},
    "json": {"action": "store_true", "help": "print JSON"},
}


@dataclass(frozen=True, slots=True)
class BenchRow:
    """Result of one mode with one batch size. Speeds are in tokens per second and include the prompts' time."""

    batch: int
    speculation: str
    tokens_per_second: float
    gain: float  # speed-up over plain decoding: median over rounds of the ratio within a round
    acceptance_rate: float | None  # None if nothing was drafted
    acceptance_length: float | None
    same_tokens: bool  # as plain decoding; rounding can change near-ties
    rounds: int = 1


@dataclass(frozen=True, slots=True)
class BenchTurn:
    """Result of decoding all prompts once in one mode."""

    outputs: list[CompletionOutput]
    seconds: float

    @property
    def tokens(self) -> list[tuple[int, ...]]:
        return [output.token_ids for output in self.outputs]

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return sum(map(len, self.tokens)) / self.seconds


@dataclass(slots=True)
class BenchResults:
    """The turns of all complete and incomplete rounds, by batch size and mode."""

    asked: Namespace
    tokens: int = 0  # per output
    title: str = ""
    turns: dict[tuple[int, SpeculationMode], list[BenchTurn]] = field(default_factory=dict)
    left_out: list[int] = field(default_factory=list)  # batch sizes

    def rows(self) -> list[BenchRow]:
        """Return a row per batch size and mode that was measured."""
        return [
            _row(batch, way, turns, self.turns[batch, SpeculationMode.OFF])
            for (batch, way), turns in self.turns.items()
            if turns
        ]

    def shown(self) -> str:
        """Return the results in the requested form."""
        rows = self.rows()
        if self.asked.json:
            return json.dumps([asdict(row) for row in rows], indent=1)
        lines = [as_text(rows, self.title)]
        rounds = min((row.rounds for row in rows), default=0)
        if rounds < self.asked.rounds or self.tokens < self.asked.tokens:
            lines.append(f"\n{self.tokens} tokens per output and {rounds} rounds; a larger --seconds allows more")
        lines += [f"no time for batch size {batch}" for batch in self.left_out]
        return "\n".join(lines)


def run(arguments: Sequence[str], progress: Progress) -> tuple[str, bool]:
    """Measure and return the table."""
    asked, config = ServerConfig.load_with("bench", _ABOUT, OPTIONS, arguments)
    budget = TimeBudget(asked.seconds)
    progress(f"loading {config.target}")

    from pilotfish.engine.llm import LLM
    from pilotfish.engine.startup import warm
    from pilotfish.engine.text.codec import Codec
    from pilotfish.server.model import model_name

    engine, codec = warm.load(config.engine(), progress), Codec.load(config.target, config.revision)
    who, drafts = engine.facts.default_proposer, config.num_draft_tokens
    title = f"{model_name(config.target)} in {engine.facts.dtype}, proposer {who}, K up to {drafts}"
    found = BenchResults(asked, title=title)
    try:
        measure(
            LLM.of(engine), {batch: _prompts(engine, codec, batch) for batch in asked.batches}, found, budget, progress
        )
    except Stopped as stop:
        if any(found.turns.values()):
            stop.report, stop.kept = found.shown(), "the table has the rounds so far"
        raise
    return found.shown(), True


def measure(
    llm: LLM, prompts: dict[int, list[Tokens]], found: BenchResults, budget: TimeBudget, progress: Progress
) -> None:
    """Run the trial, then rounds while one more fits into the time, and at least one."""
    asked = found.asked
    fixed, per_token = _trial(llm, prompts, found, budget, progress)
    left = budget.seconds - budget.elapsed
    fitting = [int((left / rounds - fixed) / per_token) for rounds in range(asked.rounds, 0, -1)]
    longest = next((tokens for tokens in fitting if tokens >= _SHORTEST), fitting[-1])
    found.tokens = min(asked.tokens, max(_TRIAL, longest))
    rounds = TimeBudget(budget.seconds - budget.elapsed, budget.clock)
    progress.begin("measuring", asked.rounds * len(found.turns), seconds=rounds.seconds)
    for number in range(asked.rounds):
        if not rounds.fits(1.0):
            break
        with rounds.spending(1.0):
            for i, ((batch, way), turns) in enumerate(found.turns.items(), 1):
                turns.append(_turn(llm, prompts[batch], found.tokens, way))
                speed = f"{turns[-1].speed:.1f} tokens/s"
                progress.update(number * len(found.turns) + i, f"batch {batch}, {way}, {speed}")


def _trial(
    llm: LLM, prompts: dict[int, list[Tokens]], found: BenchResults, budget: TimeBudget, progress: Progress
) -> tuple[float, float]:
    """Choose the batch sizes; return the seconds of a round for its prompts, and for each token of the outputs."""
    fixed = per_token = 0.0
    progress.begin("trial", len(prompts) * (1 + len(WAYS)))
    for i, (batch, some) in enumerate(prompts.items()):
        if not budget.fits(batch, _TRIAL_SHARE):
            found.left_out.append(batch)
            continue
        with budget.spending(batch):
            once = _turn(llm, some, 1, SpeculationMode.OFF).seconds
            for j, way in enumerate(WAYS, 1):
                turn = _turn(llm, some, _TRIAL, way)
                fixed += once
                per_token += max(turn.seconds - once, turn.seconds / _TRIAL) / (_TRIAL - 1)
                progress.update(i * (1 + len(WAYS)) + 1 + j, f"batch {batch}, {way}")
        found.turns |= {(batch, way): [] for way in WAYS}
    return fixed, per_token


def _prompts(engine: Engine, codec: Codec | None, batch: int) -> list[Tokens]:
    if codec is None:
        return [tuple((7 * i + j) % engine.facts.limits.vocab_size for j in range(_PROMPT)) for i in range(batch)]
    return [codec.encode(text)[-_PROMPT:] for text in corpus.held_out_prompts(batch)]


def _turn(llm: LLM, prompts: list[Tokens], tokens: int, way: SpeculationMode) -> BenchTurn:
    """Decode all prompts, with a new cache salt, so that no turn reuses prompts cached by another."""
    sampling, speculation = SamplingParams(max_tokens=tokens, ignore_eos=True), SpeculationParams(mode=way)
    start = time.perf_counter()
    outputs = llm.generate(prompts, sampling, speculation=speculation, cache_salt=f"bench-{next(_salts)}")
    return BenchTurn(outputs, time.perf_counter() - start)


def _row(batch: int, way: SpeculationMode, turns: Sequence[BenchTurn], plain: Sequence[BenchTurn]) -> BenchRow:
    stats = [output.stats for turn in turns for output in turn.outputs]
    rounds, drafted, accepted = (sum(getattr(s, name) for s in stats) for name in ("rounds", "drafted", "accepted"))
    return BenchRow(
        batch=batch,
        speculation=str(way),
        tokens_per_second=statistics.median(turn.speed for turn in turns),
        gain=statistics.median(p.seconds / turn.seconds for p, turn in zip(plain, turns, strict=False)),
        acceptance_rate=accepted / drafted if drafted else None,
        acceptance_length=1 + accepted / rounds if rounds else None,
        same_tokens=all(turn.tokens == plain[0].tokens for turn in turns),
        rounds=len(turns),
    )


def as_text(rows: Sequence[BenchRow], title: str) -> str:
    """Format the rows as aligned columns under a title."""
    lines = [title, "", f"{'batch':>5}  {'speculation':<11}  {'tokens/s':>8}  {'gain':>5}  {'acc.':>5}  tokens/round"]
    for row in rows:
        rate = "" if row.acceptance_rate is None else f"{row.acceptance_rate:.2f}"
        length = "" if row.acceptance_length is None else f"{row.acceptance_length:.2f}"
        speed = f"{row.batch:>5}  {row.speculation:<11}  {row.tokens_per_second:>8.1f}  {row.gain:>5.2f}"
        other = "" if row.same_tokens else " (tokens differ from plain decoding at near-ties)"
        lines.append(f"{speed}  {rate:>5}  {length:>12}{other}")
    return "\n".join(lines)
