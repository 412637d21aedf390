"""What became of each request, and of many of them together. Knows no network."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Outcome(StrEnum):
    """How a call ended; every call has one."""

    SERVED = "served"
    REFUSED = "refused"  # no room now, and a hint when to come again
    LATE = "late"  # the deadline could not be met, or passed
    LEFT = "left"  # the caller went away
    FAILED = "failed"  # anything else


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One request. Moments are in seconds since the run began; `intended` is when it should have been sent."""

    intended: float
    sent: float
    ended: float
    outcome: Outcome
    status: str = "OK"
    first: float | None = None  # when the first tokens came
    last: float | None = None
    tokens: int = 0
    gaps: tuple[float, ...] = ()  # between messages with tokens
    retry_seconds: float | None = None  # when the server said to come again
    drafted: int = 0
    accepted: int = 0
    rounds: int = 0
    message: str = ""  # the server's words, where it failed

    @property
    def time_to_first_token(self) -> float:
        """From the intended moment, so that a driver or server that lags does not hide what it costs; NaN if none."""
        return math.nan if self.first is None else self.first - self.intended

    @property
    def time_per_token(self) -> float:
        """Mean seconds per token after the first; NaN where there are none."""
        if self.first is None or self.last is None or self.tokens < 2:
            return math.nan
        return (self.last - self.first) / (self.tokens - 1)

    @property
    def total(self) -> float:
        """From the intended moment to the end."""
        return self.ended - self.intended


@dataclass(frozen=True, slots=True)
class Objective:
    """What a caller calls good service, in seconds."""

    time_to_first_token: float = 1.0
    time_per_token: float = 0.1

    def is_met_by(self, sample: Sample) -> bool:
        """Whether it was served, in time; a request of one token has no time per token."""
        slow = sample.time_per_token > self.time_per_token  # false for NaN
        return sample.outcome is Outcome.SERVED and sample.time_to_first_token <= self.time_to_first_token and not slow


Level = dict[str, float]  # of percentiles: "p50", "p90", "p99"; NaN where there is nothing


def percentile(values: Sequence[float], share: float) -> float:
    """Of sorted values, straight between neighbours; NaN of none. [0, 10], 0.25 -> 2.5."""
    if not values:
        return math.nan
    place = share * (len(values) - 1)
    low = math.floor(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (place - low)


def levels(values: Iterable[float]) -> Level:
    """Median, 90 and 99 in a hundred; what is not a number does not count."""
    found = sorted(value for value in values if not math.isnan(value))
    return {f"p{round(100 * share)}": percentile(found, share) for share in (0.5, 0.9, 0.99)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Many requests of one run of `seconds`. Rates are per second of the run."""

    seconds: float
    sent: int
    outcomes: dict[str, int]
    statuses: dict[str, int]
    tokens: int  # that arrived within the run, of whatever became of their requests
    good: int  # requests that met the objective
    time_to_first_token: Level
    inter_token: Level
    time_per_token: Level
    total: Level
    lag: Level  # of the driver itself: sent later than intended
    unhinted: int  # refusals that did not say when to come again
    acceptance_rate: float
    acceptance_length: float

    @classmethod
    def of(
        cls, samples: Sequence[Sample], seconds: float, objective: Objective = Objective(), since: float = 0.0
    ) -> Summary:
        """Latencies are of requests that were served and not sent before `since`; sums are of all."""
        served = [s for s in samples if s.outcome is Outcome.SERVED and s.intended >= since]
        refused = [s for s in samples if s.outcome is Outcome.REFUSED]
        drafted, rounds = sum(s.drafted for s in served), sum(s.rounds for s in served)
        accepted = sum(s.accepted for s in served)
        return cls(
            seconds=seconds,
            sent=len(samples),
            outcomes={outcome.value: sum(s.outcome is outcome for s in samples) for outcome in Outcome},
            statuses=dict(sorted(Counter(s.status for s in samples).items())),
            tokens=sum(s.tokens for s in samples),
            good=sum(map(objective.is_met_by, samples)),
            time_to_first_token=levels(s.time_to_first_token for s in served),
            inter_token=levels(gap for s in served for gap in s.gaps),
            time_per_token=levels(s.time_per_token for s in served),
            total=levels(s.total for s in served),
            lag=levels(s.sent - s.intended for s in samples if s.intended >= since),
            unhinted=sum(not s.retry_seconds for s in refused),
            acceptance_rate=accepted / drafted if drafted else math.nan,
            acceptance_length=1 + accepted / rounds if rounds else math.nan,
        )

    @property
    def adds_up(self) -> bool:
        """Whether every request that was sent has an outcome."""
        return self.sent == sum(self.outcomes.values()) == sum(self.statuses.values())

    @property
    def served(self) -> int:
        """Requests that got all they asked for."""
        return self.outcomes[Outcome.SERVED]

    @property
    def refused(self) -> int:
        """Requests that were told to come again."""
        return self.outcomes[Outcome.REFUSED]

    @property
    def tokens_per_second(self) -> float:
        """Of output, all requests together."""
        return self.tokens / self.seconds

    @property
    def goodput(self) -> float:
        """Requests per second that met the objective."""
        return self.good / self.seconds
