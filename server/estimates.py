"""Estimates of waiting and service times, made from recent steps and requests. Contains numbers only.

An unknown duration counts as zero, so that no request is refused on a guess. The check of a deadline uses an optimistic
estimate of the service time: a request is refused only if it would be late even with the fewest possible tokens. The
queue's bound in seconds uses the most likely values.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.stats import StepStats
from engine.types import Request
from server.queue import Outlook
from server.streams.output import Timeline

_NEW = 0.1  # weight of the newest value in a moving mean over about ten values
_KEEP = 0.995  # factor per step: the best rate fades, so that it follows a machine that became slower
_MIN_PROMPT_TOKENS = 32  # a step with fewer prompt tokens says nothing about the speed of prefill
RETRY_SECONDS = (1.0, 0.1, 30.0)  # hint for a refused caller: if nothing is known; minimum; maximum


class Estimates:
    """Moving means over steps and over requests that ended."""

    def __init__(self) -> None:
        self._service: float | None = None  # seconds that a request spends in the engine
        self._per_token: float | None = None  # seconds between two tokens of one output
        self._prompt_rate = 0.0  # highest recent rate of prompt tokens per second
        self._paces: dict[int, float] = {}  # the same, by the bit length of the number of decoding sequences
        self._tokens = self._most_tokens = 0.0  # mean length of ended outputs, and mean of their maximum length
        self._rounds = self._drafted = self._accepted = 0.0  # sums in which older steps count less

    def observe(self, stats: StepStats) -> None:
        """Include the statistics of a step."""
        self._rounds = self._rounds * _KEEP + stats.rounds
        self._drafted = self._drafted * _KEEP + stats.drafted
        self._accepted = self._accepted * _KEEP + stats.accepted
        seconds = sum(stats.phase_seconds.values())
        decoding = sum(forward.sequences for forward in stats.forwards if forward.kind == "verify")
        if stats.generated_tokens and decoding:  # a sequence in prefill gets no tokens and slows no other
            size = decoding.bit_length()
            self._paces[size] = _mean(self._paces.get(size), seconds * decoding / stats.generated_tokens)
        if stats.prompt_tokens >= _MIN_PROMPT_TOKENS and seconds > 0:
            self._prompt_rate = max(self._prompt_rate * _KEEP, stats.prompt_tokens / seconds)
        elif not stats.prompt_tokens and stats.generated_tokens and stats.running:
            self._per_token = _mean(self._per_token, seconds * stats.running / stats.generated_tokens)

    @property
    def acceptance_rate(self) -> float | None:
        """Share of drafted tokens that were accepted in recent steps; None before the first draft."""
        return self._accepted / self._drafted if self._drafted else None

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per round in recent steps; None before the first round."""
        return 1 + self._accepted / self._rounds if self._rounds else None

    def end(self, timeline: Timeline) -> None:
        """Include the service time of a request that has ended, if it had started."""
        if timeline.started is not None and timeline.ended is not None:
            self._service = _mean(self._service, timeline.ended - timeline.started)

    def end_output(self, tokens: int, most: int) -> None:
        """Include an output that ended with `tokens` tokens; at most `most` were allowed."""
        self._tokens = _mean(self._tokens or None, tokens)
        self._most_tokens = _mean(self._most_tokens or None, most)

    def left(self, tokens: int, most: int) -> float:
        """Return the likely number of further tokens of an output that has `tokens` of at most `most` tokens.

        Most outputs end before their maximum, so the maximum is scaled by the mean share that ended outputs used.
        """
        return max(0.0, most * self._share - tokens)

    @property
    def _share(self) -> float:
        return self._tokens / self._most_tokens if self._most_tokens else 0.0

    def turn(self, waiting: int, left: Sequence[float]) -> float:
        """Return the seconds until `waiting` requests, and then one more, have a place in the batch.

        `left` are the tokens that each running output still needs, ascending. Example: [10, 30] tokens left, 20 tokens
        per output, a token per second; with 0, 1, 2 requests waiting: 10 s, 30 s, and 10 + 20 s.
        """
        if not left or not self._paces:
            return 0.0
        nearest = min(self._paces, key=lambda size: abs(size - len(left).bit_length()))
        rounds, place = divmod(waiting, len(left))
        return (left[place] + rounds * self._tokens) * self._paces[nearest]

    def wait(self, ahead: int, running: int) -> float:
        """Return the seconds until `ahead` requests and then this one have a place; `running` requests hold all places.

        Each place becomes free once per service time, and the ends of the `running` requests are spread evenly over it.
        """
        return 0.0 if self._service is None else (ahead + 1) * self._service / (running + 1)

    def work(self, request: Request, max_len: int) -> float:
        """Return the seconds from the start of `request` to the last token that it gets for certain."""
        reading = request.num_tokens / self._prompt_rate if self._prompt_rate else 0.0
        return reading + (least_tokens(request, max_len) - 1) * (self._per_token or 0.0)

    def outlook(self, waiting: int, left: Sequence[float]) -> Outlook:
        """Return the outlook of a request behind `waiting` others without a place; `left` as in `turn`, ascending.

        The larger of two estimates counts: past service times lag behind when load rises, and the running outputs
        predict little when their lengths differ much.
        """
        before = max(0, waiting)
        wait = max(self.wait(before, len(left)), self.turn(before, left))
        return Outlook(wait if waiting >= 0 else 0.0, self._service or 0.0, self._retry(wait))

    def _retry(self, wait: float) -> float:
        """Return the seconds until all waiting requests have a place; before that a retry finds them still waiting."""
        unknown, least, most = RETRY_SECONDS
        return unknown if self._service is None else min(most, max(least, wait))


def least_tokens(request: Request, max_len: int) -> int:
    """Return the number of tokens that an output still gets for certain, at least 1.

    Until its end it has the full length only if nothing but `max_len` can end it; else it has `min_tokens`.
    """
    sampling = request.sampling
    may_end = not sampling.ignore_eos or sampling.stop or sampling.stop_token_ids or sampling.guided
    most = sampling.min_tokens if may_end else max_len - len(request.token_ids)
    return max(1, most - min((len(output.token_ids) for output in request.emitted if not output.has_ended), default=0))


def _mean(old: float | None, new: float) -> float:
    return new if old is None else old + _NEW * (new - old)
