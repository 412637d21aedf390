"""How long a batch of requests takes: one turn of one way, and turns of many ways, interleaved.

On a shared machine seconds drift by half within minutes. So all ways take turns within a round, and what counts is the
median over rounds of ratios within a round.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from benchmarks.machine import Meter, Usage
from engine.engine import Engine
from engine.stats import StepStats
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

    def turn(self) -> Turn:
        """All are over."""
        end = time.perf_counter()
        assert self.began is not None, "a sequence without a token"
        made = sum(map(len, self.tokens))
        return Turn(self.tokens, end - self.start, made - self.at_begin, end - self.began, self.meter.stop())


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
    done: list[StepStats] = []
    while engine.has_work:
        output = engine.step()
        for event in output.events:
            clock.tokens[int(event.request_id)] += event.token_ids
        clock.tick()
        done.append(output.stats)
    return _counted(clock.turn(), done)


def _counted(turn: Turn, steps: Sequence[StepStats]) -> Turn:
    """With what the steps say of themselves."""
    decoding = [s for s in steps if [forward.kind for forward in s.forwards if forward.kind != "draft"] == ["verify"]]
    return replace(
        turn,
        verify_seconds=[sum(s.phase_seconds.values()) - s.phase_seconds["propose"] for s in decoding],
        draft_seconds=[s.phase_seconds["propose"] for s in decoding],
        drafted=sum(s.drafted for s in steps),
        rounds=sum(s.rounds for s in steps),
        accepted=sum(s.accepted for s in steps),
    )


def interleave(
    ways: Mapping[str, Callable[[], Turn]],
    rounds: int,
    tell: Callable[[str], None] = lambda _: None,
    hopeless: float = 0.0,
    always: Collection[str] = (),
) -> dict[str, list[Turn]]:
    """Every way in every round, in turns forwards and backwards; a first round that does not count warms up.

    A way whose speed in the first round is below `hopeless` times the best one's is not run again and has no turns,
    unless it is one of `always`.
    """
    first = {name: run() for name, run in ways.items()}
    best = max(turn.speed for turn in first.values())
    names = [name for name, turn in first.items() if name in always or turn.speed >= hopeless * best]
    turns: dict[str, list[Turn]] = {name: [] for name in ways}
    for number in range(rounds):
        for name in names[:: -1 if number % 2 else 1]:
            turns[name].append(ways[name]())
            tell(f"round {number + 1}, {name}: {turns[name][-1].speed:.1f} tokens/s")
    return turns


def check_same(turns: Mapping[str, Sequence[Turn]]) -> None:
    """Whatever the way, the tokens are the same.

    Raises:
        RuntimeError: they are not.
    """
    everyone = [(name, turn.tokens) for name, mine in turns.items() for turn in mine]
    for name, tokens in everyone:
        if tokens != everyone[0][1]:
            raise RuntimeError(f"{name} gave other tokens than {everyone[0][0]}")


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
