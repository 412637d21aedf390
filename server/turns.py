"""Fair scheduling between callers: whose request the engine runs next, and estimates of the wait of new requests.

Estimates come from recent steps and requests. Unknown durations, and those measured minutes ago, count as zero, so no
request is refused on a guess. The deadline check is optimistic: a request is refused only if it would be late even at
the best recent speed, with outputs before it as short as the shortest recent ones, and with the minimum number of
tokens of its own. The queue's limit in seconds uses the expected values.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from pilotfish.engine.stats import Clock, StepStats
from pilotfish.engine.types import Request
from pilotfish.server.model import EngineView
from pilotfish.server.queue import AdmissionQueue, Outlook
from pilotfish.server.streams.stream import OutputStream, Timeline


def max_len_of(request: Request, engine: EngineView) -> int:
    """Return the maximum number of tokens of prompt and output."""
    return request.max_len(engine.facts.limits.max_model_len, engine.config.max_output_tokens)


class CallerTurns:
    """Callers in the queue and in the engine. Each gets an equal share of the places, however many it has queued."""

    def __init__(self, queue: AdmissionQueue, engine: EngineView, live: Mapping[str, OutputStream]) -> None:
        self._queue, self._engine, self._live = queue, engine, live
        self._running: list[tuple[Request, int]] | None = None  # outputs in the engine; None: not computed yet
        self._outlooks: dict[str, Outlook] = {}  # by caller; cached because hundreds may be refused between two steps

    def renew(self) -> None:
        """Drop cached values: requests have arrived, started or ended, or outputs have new tokens."""
        self._running = None
        self._outlooks.clear()

    def next(self) -> str | None:
        """Return the caller whose request the engine runs next, if any: the one with the fewest outputs in it.

        Without room, a caller below an equal share may displace others. Beyond that the engine holds one request of
        each caller, so that it can give a free place to the caller with the fewest tokens so far.
        """
        if not self._queue:
            return None
        held = self._held
        waiting = sorted(self._queue.callers, key=held.__getitem__)
        if self._engine.has_room:
            return waiting[0]
        part = self._equal_part(waiting[0])
        unserved = {request.caller for request, tokens in self._outputs if not tokens}
        return next((c for c in waiting if held[c] < part or (part and c not in unserved)), None)

    def outlook(self, caller: str, estimates: Estimates) -> Outlook:
        """Return the expected outlook of a caller's new request, behind all its others."""
        if caller not in self._outlooks:
            self._outlooks[caller] = estimates.outlook(*self._before(caller, math.inf, estimates, likely=True))
        return self._outlooks[caller]

    def least_wait(self, caller: str, due: float, estimates: Estimates) -> float:
        """Return the minimum seconds until a caller's request that is due at `due` can have a place."""
        return estimates.wait(*self._before(caller, due, estimates, likely=False), likely=False)

    def _before(
        self, caller: str, due: float, estimates: Estimates, *, likely: bool
    ) -> tuple[list[float], list[float]]:
        """Return the remaining tokens of running and waiting outputs before a caller's request; none if it can start.

        It can while its caller has less than an equal share of the places, because others' requests then do not precede
        it. Else it probably gets the place of one of its caller's outputs, and at best any place.
        """
        ahead, outputs, held = self._queue.ahead(due, caller), self._outputs, self._held[caller]
        waiting = [(request, 0) for request in ahead for _ in range(request.sampling.n)]
        engine = self._engine
        free = engine.config.max_batch_size - engine.load.num_running if engine.has_room else 0
        if len(waiting) < max(free, self._equal_part(caller) - held):
            return [], []
        if likely and held:
            outputs = [output for output in outputs if output[0].caller == caller]
        left, behind = (estimates.left(map(self._lengths, some), likely=likely) for some in (outputs, waiting))
        return left, behind

    def _lengths(self, output: tuple[Request, int]) -> tuple[int, int, int]:
        """Return an output's current, minimum and maximum number of tokens."""
        request, tokens = output
        max_len = max_len_of(request, self._engine)
        return tokens, sure_tokens(request, max_len), max_len - len(request.token_ids)

    def _equal_part(self, caller: str) -> int:
        """Return the places of a caller's equal share; 0 if no other caller is live."""
        callers = {stream.request.caller for stream in self._live.values()} | {caller}
        return max(1, self._engine.config.max_batch_size // len(callers)) if len(callers) > 1 else 0

    @property
    def _outputs(self) -> list[tuple[Request, int]]:
        """The outputs in the engine: request and number of tokens of each."""
        if self._running is None:
            started = [stream for stream in self._live.values() if stream.timeline.started is not None]
            outputs = ((stream.request, output) for stream in started for output in stream.outputs)
            self._running = [(request, output.num_tokens) for request, output in outputs if not output.has_ended]
        return self._running

    @property
    def _held(self) -> Counter[str]:
        """The number of them per caller."""
        return Counter(request.caller for request, _ in self._outputs)


_MOST_WEIGHT = 10.0  # a mean covers about this many values
_FADE_SECONDS = 30.0  # in which a value loses a factor of e of its weight
_UNKNOWN = 0.5  # below this total weight a value is unknown: 20 s after one value, 90 s after many
_RISE = 0.02  # share of the difference by which the minimum rises with each greater value
_KEEP = 0.995  # factor per step, for sums in which older steps count less
RETRY_SECONDS = (1.0, 0.1, 30.0)  # retry hint of a refused caller: default; minimum; maximum


class RecentValues:
    """Mean and minimum of recent values; newer ones count more, and all decay with time."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._weight, self._then = clock, 0.0, clock()
        self._mean = self._least = 0.0

    def add(self, value: float) -> None:
        weight, self._then = self._now_weight, self._clock()
        self._weight = min(weight + 1, _MOST_WEIGHT)
        self._least = min(value, self._least + _RISE * (value - self._least)) if weight >= _UNKNOWN else value
        self._mean += (value - self._mean) / self._weight if weight >= _UNKNOWN else value - self._mean

    def value(self, *, likely: bool) -> float | None:
        """Return the mean if `likely`, else the minimum; None if unknown."""
        known = self._now_weight >= _UNKNOWN
        return (self._mean if likely else self._least) if known else None

    @property
    def _now_weight(self) -> float:
        return self._weight * math.exp((self._then - self._clock()) / _FADE_SECONDS)


class Estimates:
    """Estimates from recent steps and recently ended requests."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._service = RecentValues(clock)  # seconds that a request spends in the engine
        self._used = RecentValues(clock)  # share of their maximum length that ended outputs used
        self._reading = RecentValues(clock)  # seconds per prompt token, from the engine's cost model
        self._unread = RecentValues(clock)  # share of a prompt that the prefix cache did not have
        self._decode_seconds: tuple[float, ...] = ()  # as `StepStats` has them
        # Seconds between two tokens of an output relative to a step without drafts, and the number of decoding
        # sequences.
        self._pace_ratio, self._decoding = RecentValues(clock), RecentValues(clock)
        self._rounds = self._drafted = self._accepted = 0.0  # sums in which older steps count less

    def observe(self, stats: StepStats) -> None:
        self._rounds = self._rounds * _KEEP + stats.rounds
        self._drafted = self._drafted * _KEEP + stats.drafted
        self._accepted = self._accepted * _KEEP + stats.accepted
        seconds = sum(stats.phase_seconds.values())
        decoding = sum(forward.sequences for forward in stats.forwards if forward.kind == "verify")
        self._decode_seconds = stats.decode_seconds
        expected = self._expected(decoding)
        if stats.generated_tokens and decoding and expected:  # a prefill gets no tokens and slows no other
            self._pace_ratio.add(seconds * decoding / stats.generated_tokens / expected)
            self._decoding.add(decoding)
        if stats.prompt_tokens and stats.prompt_token_seconds:
            self._reading.add(stats.prompt_token_seconds)
        if stats.prefix_lookups:
            self._unread.add(1 - stats.prefix_hits / stats.prefix_lookups)

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
            self._service.add(timeline.ended - timeline.started)

    def end_output(self, tokens: int, most: int) -> None:
        """Include an output that ended with `tokens` of at most `most` tokens, for any reason.

        An output that its caller cancelled counts with its length at that time, because that is when its place became
        free.
        """
        self._used.add(tokens / most)

    def left(self, outputs: Iterable[tuple[int, int, int]], *, likely: bool) -> list[float]:
        """Return the numbers of remaining tokens of outputs with `tokens` of at least `sure` and at most `most` each.

        Most outputs end before their maximum, so it is scaled by the mean (or minimum) share of it that ended outputs
        used.
        """
        used = self._used.value(likely=likely) or 0.0
        return [max(0.0, sure - tokens, most * used - tokens) for tokens, sure, most in outputs]

    def wait(self, left: Iterable[float], ahead: Iterable[float], *, likely: bool) -> float:
        """Return the seconds until a request has a place, behind others that wait `ahead` of it.

        `left` and `ahead` are the remaining tokens of each running and each waiting output. Example: [10, 30] and a
        token per second. Behind [], [20], [20, 20]: 10 s, 10 + 20 s, and again 30 s.
        """
        places = list(left)
        pace = self._pace(len(places), likely=likely)
        if not places or pace is None:
            return 0.0
        heapq.heapify(places)
        for tokens in ahead:
            heapq.heapreplace(places, places[0] + tokens)
        return places[0] * pace

    def _pace(self, decoding: int, *, likely: bool) -> float | None:
        """Seconds between two tokens of an output: likely with as many others, at least with the fewest of late."""
        ratio, fewest = (values.value(likely=likely) for values in (self._pace_ratio, self._decoding))
        if ratio is None or fewest is None:
            return None
        return ratio * self._expected(decoding if likely else min(decoding, int(fewest)))

    def _expected(self, decoding: int) -> float:
        """The engine's estimate of a step without drafts with this many decoding sequences, in seconds; 0: unknown."""
        known = self._decode_seconds
        return known[min(max(0, decoding - 1).bit_length(), len(known) - 1)] if known else 0.0

    def work(self, request: Request, max_len: int, running: int) -> float:
        """Return the seconds from the start of `request`, beside `running` outputs, to its last certain token."""
        reading, unread = (values.value(likely=False) for values in (self._reading, self._unread))
        pace = self._pace(running + 1, likely=False) or 0.0
        seconds = request.num_tokens * (reading or 0.0) * (1.0 if unread is None else unread)
        return seconds + (least_tokens(request, max_len) - 1) * pace

    def outlook(self, left: Sequence[float], ahead: Sequence[float]) -> Outlook:
        """Return the expected outlook of a request behind others; `left` and `ahead` as for `wait`."""
        wait, service = self.wait(left, ahead, likely=True), self._service.value(likely=True)
        unknown, least, most = RETRY_SECONDS
        retry = unknown if service is None else min(most, max(least, wait))
        return Outlook(wait, service or 0.0, retry)


def least_tokens(request: Request, max_len: int) -> int:
    """Return the minimum number of remaining tokens of an output, at least 1."""
    emitted = min((len(output.token_ids) for output in request.received if not output.has_ended), default=0)
    return max(1, sure_tokens(request, max_len) - emitted)


def sure_tokens(request: Request, max_len: int) -> int:
    """Return the minimum number of tokens of an output, unless its caller disconnects.

    It is `max_len` if nothing else can end the output, else `min_tokens`.
    """
    sampling = request.sampling
    may_end = not sampling.ignore_eos or sampling.stop or sampling.stop_token_ids or sampling.guided
    return sampling.min_tokens if may_end else max_len - len(request.token_ids)
