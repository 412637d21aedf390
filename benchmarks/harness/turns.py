"""The time of a batch of requests: one turn of one way, and interleaved turns of many ways.

On a shared machine, times drift by half within minutes. So all ways take turns within a round, and the result is the
median over rounds of the ratios within a round.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.harness.meter import CpuUsage, Meter


@dataclass(frozen=True, slots=True)
class Turn:
    """A batch, from the first request until the last token.

    The decoding part begins when every sequence has a token, because prefill is complete then.
    """

    tokens: list[list[int]]
    seconds: float
    decode_tokens: int
    decode_seconds: float
    usage: CpuUsage
    verify_seconds: list[float] = field(default_factory=list)  # of decoding steps, without drafting
    drafted: int = 0
    rounds: int = 0  # of sequences that had drafts
    accepted: int = 0

    @property
    def speed(self) -> float:
        """Return tokens per second of the decoding part."""
        return self.decode_tokens / self.decode_seconds

    @property
    def whole_speed(self) -> float:
        """Return tokens per second, including the prompts."""
        return sum(map(len, self.tokens)) / self.seconds

    @property
    def acceptance_rate(self) -> float:
        """Return accepted / drafted; 0 if nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def foreign(self) -> float:
        """Return the average cores that others used or that were stolen; 0 if unknown."""
        return ((self.usage.foreign or 0.0) + (self.usage.stolen or 0.0)) / self.usage.wall


@dataclass
class Clock:
    """Collects tokens as they arrive and detects the start of decoding. `now` may count only a part of the time."""

    tokens: list[list[int]]
    now: Callable[[], float] = time.perf_counter
    start: float = field(init=False)
    began: float | None = None
    at_begin: int = 0
    meter: Meter = field(default_factory=Meter.start)

    def __post_init__(self) -> None:
        self.start = self.now()

    @classmethod
    def of(cls, batch: int, now: Callable[[], float] = time.perf_counter) -> Clock:
        """Return a clock for `batch` sequences."""
        return cls([[] for _ in range(batch)], now)

    def tick(self) -> None:
        """Record that a step has added tokens."""
        if self.began is None and all(self.tokens):
            self.began, self.at_begin = self.now(), sum(map(len, self.tokens))

    def turn(self) -> Turn:
        """Return the turn, after all sequences have ended."""
        end = self.now()
        assert self.began is not None, "a sequence without a token"
        made = sum(map(len, self.tokens))
        return Turn(self.tokens, end - self.start, made - self.at_begin, end - self.began, self.meter.stop())


def interleave(
    ways: Mapping[str, Callable[[], Turn]], rounds: int, tell: Callable[[str], None] = lambda _: None
) -> dict[str, list[Turn]]:
    """Run a warm-up round that is not counted, then every way in every round."""
    for run in ways.values():
        run()
    return take_turns(ways, rounds, tell)


def promising(first: Mapping[str, Turn], hopeless: float, always: Collection[str]) -> list[str]:
    """Return the ways with at least `hopeless` times the speed of the fastest way, and those in `always`."""
    best = max(turn.speed for turn in first.values())
    return [name for name, turn in first.items() if name in always or turn.speed >= hopeless * best]


def worth_while(
    first: dict[str, Turn], ways: Mapping[str, Callable[[], Turn]], hopeless: float, always: Collection[str]
) -> list[str]:
    """Return the promising ways. A way that seems slow is run once more, because a single turn can be disturbed."""
    for name in first.keys() - set(promising(first, hopeless, always)):
        first[name] = max(first[name], ways[name](), key=lambda turn: turn.speed)
    return promising(first, hopeless, always)


def take_turns(
    ways: Mapping[str, Callable[[], Turn]],
    rounds: int,
    tell: Callable[[str], None] = lambda _: None,
    before: Callable[[], None] = lambda: None,
    ends: type[Exception] | tuple[()] = (),
) -> dict[str, list[Turn]]:
    """Run every way in every round, in alternating order; `before` is called before each round.

    A way that raises `ends` is removed, including its earlier turns.
    """
    turns: dict[str, list[Turn]] = {name: [] for name in ways}
    for number in range(rounds):
        before()
        for name in list(turns)[:: -1 if number % 2 else 1]:
            try:
                turn = ways[name]()
            except ends as error:
                del turns[name]
                tell(f"round {number + 1}, {name}: {error}")
                continue
            turns[name].append(turn)
            tell(f"round {number + 1}, {name}: {turn.speed:.1f} tokens/s")
    return turns


def ratios(mine: Sequence[Turn], others: Sequence[Turn], *, whole: bool = False) -> list[float]:
    """Return the ratios of speed, round by round."""
    pairs = zip(mine, others, strict=True)
    return [a.whole_speed / b.whole_speed if whole else a.speed / b.speed for a, b in pairs]


def median_speed(turns: Sequence[Turn]) -> float:
    """Return median tokens per second of the decoding part."""
    return statistics.median(turn.speed for turn in turns)


def foreign(turns: Sequence[Turn]) -> float:
    """Return the cores that others used in the worst of these turns."""
    return max((turn.foreign for turn in turns), default=0.0)
