"""`pilotfish bench`: measures the speed-up of speculation on this machine. Contains no tensor code.

Each round runs plain decoding, a fixed number of drafts and AUTO, because the speed of a shared machine changes from
minute to minute. The result is the median over rounds of the ratio within a round.
"""

from __future__ import annotations

import json
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from pilotfish.engine.errors import ModelError
from pilotfish.engine.params import SamplingParams, SpeculationMode, SpeculationParams
from pilotfish.models import corpus
from pilotfish.server.commands.arguments import Tokens
from pilotfish.server.config import ServerConfig

if TYPE_CHECKING:
    from pilotfish.engine.engine import Engine
    from pilotfish.engine.llm import LLM, CompletionOutput
    from pilotfish.engine.text.codec import Codec

ERRORS = (ValidationError, ModelError, OSError)
WAYS = (SpeculationMode.OFF, SpeculationMode.FIXED, SpeculationMode.AUTO)
_PROMPT = 64  # tokens of a prompt, for a model without a tokenizer
_salts = count()


_ABOUT = """Measure the speed-up of speculation on this machine. Accepts the options, variables and file of `serve`.

Also: --tokens (per output), --rounds, --batches (batch sizes), and --json (print JSON).
"""


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


@dataclass(frozen=True, slots=True)
class BenchTurn:
    """Result of decoding all prompts once in one mode."""

    outputs: list[CompletionOutput]
    seconds: float

    @property
    def tokens(self) -> list[tuple[int, ...]]:
        return [output.token_ids for output in self.outputs]


def run(arguments: Sequence[str], progress: Callable[[str], None]) -> tuple[str, bool]:
    """Measure and return the table; `progress` receives progress messages."""
    from pilotfish.engine.llm import LLM
    from pilotfish.engine.startup import warm
    from pilotfish.engine.text.codec import Codec
    from pilotfish.server.model import model_name

    own: dict[str, dict[str, Any]] = {
        "tokens": {"type": int, "default": 64},
        "rounds": {"type": int, "default": 3},
        "batches": {"type": int, "nargs": "+", "default": [1, 8]},
        "json": {"action": "store_true"},
    }
    asked, config = ServerConfig.load_with("bench", _ABOUT, own, arguments)
    engine, codec = warm.load(config.engine(), progress), Codec.load(config.target, config.revision)
    llm = LLM.of(engine)
    prompts = [_prompts(engine, codec, batch) for batch in asked.batches]
    rows = [row for some in prompts for row in _rows(llm, some, asked, progress)]
    if asked.json:
        return json.dumps([asdict(row) for row in rows], indent=1), True
    who, drafts = engine.facts.default_proposer, config.num_draft_tokens
    return as_text(rows, f"{model_name(config.target)} in {engine.facts.dtype}, proposer {who}, K up to {drafts}"), True


def _rows(llm: LLM, prompts: list[Tokens], asked: Namespace, progress: Callable[[str], None]) -> list[BenchRow]:
    batch = len(prompts)
    turns: dict[SpeculationMode, list[BenchTurn]] = {way: [] for way in WAYS}
    for number in range(asked.rounds + 1):
        for way in WAYS:
            progress(f"batch {batch}, round {number} of {asked.rounds}, {way}")
            turn = _turn(llm, prompts, asked.tokens, way)
            if number:  # the first round warms up
                turns[way].append(turn)
    return [_row(batch, way, turns[way], turns[SpeculationMode.OFF]) for way in WAYS]


def _prompts(engine: Engine, codec: Codec | None, batch: int) -> list[Tokens]:
    if codec is None:
        return [tuple((7 * i + j) % engine.facts.limits.vocab_size for j in range(_PROMPT)) for i in range(batch)]
    return [codec.encode(text) for text in corpus.held_out_prompts(batch)]


def _turn(llm: LLM, prompts: list[Tokens], tokens: int, way: SpeculationMode) -> BenchTurn:
    """Decode all prompts, with a new cache salt, so that no turn reuses prompts cached by another."""
    sampling, speculation = SamplingParams(max_tokens=tokens, ignore_eos=True), SpeculationParams(mode=way)
    start = time.perf_counter()
    outputs = llm.generate(prompts, sampling, speculation=speculation, cache_salt=f"bench-{next(_salts)}")
    return BenchTurn(outputs, time.perf_counter() - start)


def _row(batch: int, way: SpeculationMode, turns: Sequence[BenchTurn], plain: Sequence[BenchTurn]) -> BenchRow:
    stats = [output.stats for output in turns[-1].outputs]
    rounds, drafted, accepted = (sum(getattr(s, name) for s in stats) for name in ("rounds", "drafted", "accepted"))
    return BenchRow(
        batch=batch,
        speculation=str(way),
        tokens_per_second=statistics.median(sum(map(len, turn.tokens)) / turn.seconds for turn in turns),
        gain=statistics.median(p.seconds / turn.seconds for p, turn in zip(plain, turns, strict=True)),
        acceptance_rate=accepted / drafted if drafted else None,
        acceptance_length=1 + accepted / rounds if rounds else None,
        same_tokens=all(turn.tokens == plain[0].tokens for turn in turns),
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
