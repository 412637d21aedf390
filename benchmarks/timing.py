"""How long a batch of requests takes: one turn of one way, and turns of many ways, interleaved.

On a shared machine seconds drift by half within minutes. So all ways take turns within a round, and what counts is the
median over rounds of ratios within a round.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from benchmarks.machine import Meter, Usage
from engine.engine import Engine
from engine.types import Request, SamplingParams, SpeculationMode, SpeculationParams

AUTO = "auto"
_salts = count()


@dataclass(frozen=True, slots=True)
class Turn:
    """A batch, from the first request until the last token.

    The decoding part begins when every sequence has a token: reading the prompts is over then.
    """

    tokens: list[list[int]]
    seconds: float
    decode_tokens: int
    decode_seconds: float
    usage: Usage
    steps: int = 0
    drafted: int = 0
    rounds: int = 0  # of sequences that had drafts
    accepted: int = 0

    @property
    def speed(self) -> float:
        """Tokens per second of the decoding part."""
        return self.decode_tokens / self.decode_seconds

    @property
    def whole_speed(self) -> float:
        """Tokens per second, prompts included."""
        return sum(map(len, self.tokens)) / self.seconds

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted; 0 where nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def foreign(self) -> float:
        """Cores that others used meanwhile, or were stolen, on average; 0 where that is not known."""
        return ((self.usage.foreign or 0.0) + (self.usage.stolen or 0.0)) / self.usage.wall


@dataclass
class Clock:
    """Collects tokens as they come and knows when decoding began."""

    tokens: list[list[int]]
    start: float = field(default_factory=time.perf_counter)
    began: float | None = None
    at_begin: int = 0
    meter: Meter = field(default_factory=Meter.start)

    @classmethod
    def of(cls, batch: int) -> Clock:
        """For so many sequences."""
        return cls([[] for _ in range(batch)])

    def tick(self) -> None:
        """Tokens were added by a step."""
        if self.began is None and all(self.tokens):
            self.began, self.at_begin = time.perf_counter(), sum(map(len, self.tokens))

    def turn(self, **counts: int) -> Turn:
        """All are over."""
        end = time.perf_counter()
        assert self.began is not None, "a sequence without a token"
        made = sum(map(len, self.tokens))
        return Turn(self.tokens, end - self.start, made - self.at_begin, end - self.began, self.meter.stop(), **counts)


def way(k: int | str, proposer: str | None = None, most: int = 8) -> SpeculationParams:
    """0 is plain decoding, another number that many drafts each time, `auto` as many as pay up to `most`."""
    if k == AUTO:
        return SpeculationParams(mode=SpeculationMode.AUTO, num_draft_tokens=most, proposer=proposer)
    if k == 0:
        return SpeculationParams(mode=SpeculationMode.OFF)
    return SpeculationParams(mode=SpeculationMode.FIXED, num_draft_tokens=int(k), proposer=proposer)


def run_turn(
    engine: Engine,
    prompts: Sequence[tuple[int, ...]],
    tokens: int,
    speculation: SpeculationParams,
    salt: str | None = None,
) -> Turn:
    """Greedy, to the last token; under a salt of its own nothing is cached from one turn to the next."""
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    salt = f"turn-{next(_salts)}" if salt is None else salt
    clock = Clock.of(len(prompts))
    for i, prompt in enumerate(prompts):
        name = str(i)
        request = Request(
            request_id=name, token_ids=prompt, sampling=sampling, speculation=speculation, cache_salt=f"{salt}-{i}"
        )
        engine.add(request)
    steps = drafted = rounds = accepted = 0
    while engine.has_work:
        output = engine.step()
        for event in output.events:
            clock.tokens[int(event.request_id)] += event.token_ids
        clock.tick()
        stats = output.stats
        steps, drafted = steps + 1, drafted + stats.drafted
        rounds, accepted = rounds + stats.rounds, accepted + stats.accepted
    return clock.turn(steps=steps, drafted=drafted, rounds=rounds, accepted=accepted)


def interleave(
    ways: Mapping[str, Callable[[], Turn]], rounds: int, tell: Callable[[str], None] = lambda _: None
) -> dict[str, list[Turn]]:
    """Every way in every round, in turns forwards and backwards; a first round that does not count warms up.

    Raises:
        RuntimeError: two ways gave other tokens.
    """
    turns: dict[str, list[Turn]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        names = list(ways) if number % 2 else list(ways)[::-1]
        for name in names:
            turn = ways[name]()
            tell(f"round {number}, {name}: {turn.speed:.1f} tokens/s")
            if number:
                turns[name].append(turn)
    return turns


def check_same(turns: Mapping[str, Sequence[Turn]]) -> None:
    """Whatever the way, the tokens are those of the first one.

    Raises:
        RuntimeError: they are not.
    """
    (first, reference), *others = turns.items()
    for name, mine in [(first, reference), *others]:
        if any(turn.tokens != reference[0].tokens for turn in mine):
            raise RuntimeError(f"{name} gave other tokens than {first}")


def ratios(mine: Sequence[Turn], others: Sequence[Turn], *, whole: bool = False) -> list[float]:
    """Of speed, round by round."""
    speed = (lambda turn: turn.whole_speed) if whole else (lambda turn: turn.speed)
    return [speed(a) / speed(b) for a, b in zip(mine, others, strict=True)]


def median_speed(turns: Sequence[Turn]) -> float:
    """Tokens per second of the decoding part."""
    return statistics.median(turn.speed for turn in turns)
