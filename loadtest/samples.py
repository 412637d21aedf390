"""The result of each request, and a summary of many. Makes no calls to a server."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Outcome(StrEnum):
    """How a call ended; every call has one outcome."""

    SERVED = "served"
    REFUSED = "refused"  # the server had no capacity and told the caller when to retry
    LATE = "late"  # the deadline could not be met, or passed
    LEFT = "left"  # the caller cancelled
    FAILED = "failed"  # anything else


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One request. Times are in seconds since the run began; `intended` is when it should have been sent."""

    intended: float
    sent: float
    ended: float
    outcome: Outcome
    status: str = "OK"
    first: float | None = None  # when the first tokens arrived
    last: float | None = None
    tokens: int = 0
    gaps: tuple[float, ...] = ()  # between messages with tokens
    retry_seconds: float | None = None  # the delay after which the server asks for a retry
    drafted: int = 0
    accepted: int = 0
    rounds: int = 0
    message: str = ""  # the server's error message, if the call failed

    @property
    def time_to_first_token(self) -> float:
        """Return the time since the intended moment, so that delays of driver or server count; NaN without a token."""
        return math.nan if self.first is None else self.first - self.intended

    @property
    def time_per_token(self) -> float:
        """Return mean seconds per token after the first; NaN if there are none."""
        if self.first is None or self.last is None or self.tokens < 2:
            return math.nan
        return (self.last - self.first) / (self.tokens - 1)

    @property
    def total(self) -> float:
        """Return the time from the intended moment to the end."""
        return self.ended - self.intended


@dataclass(frozen=True, slots=True)
class Objective:
    """The times, in seconds, within which a caller considers the service good."""

    time_to_first_token: float = 1.0
    time_per_token: float = 0.1

    def is_met_by(self, sample: Sample) -> bool:
        """Return whether the request was served in time. A request of one token has no time per token."""
        slow = sample.time_per_token > self.time_per_token  # false for NaN
        return sample.outcome is Outcome.SERVED and sample.time_to_first_token <= self.time_to_first_token and not slow


Level = dict[str, float]  # percentiles: "p50", "p90", "p99"; NaN without data


def percentile(values: Sequence[float], share: float) -> float:
    """Return the quantile `share` of sorted values, interpolated linearly; NaN for no values. [0, 10], 0.25 -> 2.5."""
    if not values:
        return math.nan
    place = share * (len(values) - 1)
    low = math.floor(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (place - low)


def levels(values: Iterable[float]) -> Level:
    """Return the 50th, 90th and 99th percentile; NaN values are ignored."""
    found = sorted(value for value in values if not math.isnan(value))
    return {f"p{round(100 * share)}": percentile(found, share) for share in (0.5, 0.9, 0.99)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A summary of many requests in one run of `seconds`. Rates are per second of the run."""

    seconds: float
    sent: int
    outcomes: dict[str, int]
    statuses: dict[str, int]
    tokens: int  # received within the run, whatever the outcome of their requests
    good: int  # requests that met the objective
    time_to_first_token: Level
    inter_token: Level
    time_per_token: Level
    total: Level
    lag: Level  # how much later than intended the driver sent the requests
    unhinted: int  # refusals without a retry delay
    acceptance_rate: float
    acceptance_length: float

    @classmethod
    def of(
        cls, samples: Sequence[Sample], seconds: float, objective: Objective = Objective(), since: float = 0.0
    ) -> Summary:
        """Summarise the samples. Latencies cover served requests sent at `since` or later; sums cover all requests."""
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
        """Return whether every request that was sent has an outcome."""
        return self.sent == sum(self.outcomes.values()) == sum(self.statuses.values())

    @property
    def served(self) -> int:
        """Return the number of requests that were completed."""
        return self.outcomes[Outcome.SERVED]

    @property
    def refused(self) -> int:
        """Return the number of requests that the server refused with a retry delay."""
        return self.outcomes[Outcome.REFUSED]

    @property
    def tokens_per_second(self) -> float:
        """Return output tokens per second, summed over all requests."""
        return self.tokens / self.seconds

    @property
    def goodput(self) -> float:
        """Return requests per second that met the objective."""
        return self.good / self.seconds
