"""How long a batch of requests takes: one turn of one way, and turns of many ways, interleaved.

On a shared machine seconds drift by half within minutes. So all ways take turns within a round, and what counts is the
median over rounds of ratios within a round.
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

    The decoding part begins when every sequence has a token: reading the prompts is over then.
    """

    tokens: list[list[int]]
    seconds: float
    decode_tokens: int
    decode_seconds: float
    usage: CpuUsage
    verify_seconds: list[float] = field(default_factory=list)  # of decoding steps, without their drafting
    draft_seconds: list[float] = field(default_factory=list)  # of the same steps
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
    """Collects tokens as they come and knows when decoding began. `now` may count a part of the time alone."""

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
        """For so many sequences."""
        return cls([[] for _ in range(batch)], now)

    def tick(self) -> None:
        """Tokens were added by a step."""
        if self.began is None and all(self.tokens):
            self.began, self.at_begin = self.now(), sum(map(len, self.tokens))

    def turn(self) -> Turn:
        """All are over."""
        end = self.now()
        assert self.began is not None, "a sequence without a token"
        made = sum(map(len, self.tokens))
        return Turn(self.tokens, end - self.start, made - self.at_begin, end - self.began, self.meter.stop())


def interleave(
    ways: Mapping[str, Callable[[], Turn]], rounds: int, tell: Callable[[str], None] = lambda _: None
) -> dict[str, list[Turn]]:
    """A first round that does not count warms up; then every way in every round."""
    for run in ways.values():
        run()
    return take_turns(ways, rounds, tell)


def promising(first: Mapping[str, Turn], hopeless: float, always: Collection[str]) -> list[str]:
    """Those whose speed is at least `hopeless` times the best one's, and those of `always`."""
    best = max(turn.speed for turn in first.values())
    return [name for name, turn in first.items() if name in always or turn.speed >= hopeless * best]


def worth_while(
    first: dict[str, Turn], ways: Mapping[str, Callable[[], Turn]], hopeless: float, always: Collection[str]
) -> list[str]:
    """Those that are promising; one that seems not to be may try again, because a single turn can be disturbed."""
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
    """Every way in every round, forwards and backwards by turns; `before` is called before each round.

    A way that raises `ends` is left out from then on, its earlier turns too.
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
    """Of speed, round by round."""
    pairs = zip(mine, others, strict=True)
    return [a.whole_speed / b.whole_speed if whole else a.speed / b.speed for a, b in pairs]


def median_speed(turns: Sequence[Turn]) -> float:
    """Tokens per second of the decoding part."""
    return statistics.median(turn.speed for turn in turns)


def foreign(turns: Sequence[Turn]) -> float:
    """Cores that others used, in the worst of these turns."""
    return max((turn.foreign for turn in turns), default=0.0)
