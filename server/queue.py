"""The bounded queue before the engine. It reads only the caller, the size and the due time of each request."""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from operator import attrgetter

from pilotfish.engine.types import Request
from pilotfish.server.errors import QueueFull

SERVICE_SHARE = 0.1  # a request may always wait for this share of its estimated service time


@dataclass(frozen=True, slots=True)
class Outlook:
    """Estimated times for a request that arrives now, in seconds; an unknown time counts as zero."""

    wait: float = 0.0  # until it has a place in the batch
    service: float = 0.0  # from its start in the batch to its end
    retry: float = 1.0  # until a retry of a refused request can succeed


NOTHING_KNOWN = Outlook()


class FairBound:
    """Usage per caller under one limit. Each caller may use an equal share of it, however much the others use.

    A single caller may use the whole limit. Accepted requests are never removed when further callers arrive, so k
    callers hold at most 1 + 1/2 + ... + 1/k times the limit.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.total = limit, 0
        self._held: Counter[str] = Counter()

    def has_room(self, caller: str, amount: int = 1) -> bool:
        """Whether `caller` may add `amount`."""
        share = self.limit // len(self._held.keys() | {caller})
        return self.total + amount <= self.limit or self._held[caller] + amount <= share

    def add(self, caller: str, amount: int) -> None:
        """Add `amount`, which may be negative, to the usage of `caller`."""
        self.total += amount
        self._held[caller] += amount
        if not self._held[caller]:
            del self._held[caller]


@dataclass(order=True, slots=True)
class _Waiting:
    due: float
    number: int  # order of arrival, for requests that are due at the same time
    request: Request = field(compare=False)
    num_tokens: int = field(compare=False)  # maximum, of prompt and output


class AdmissionQueue:
    """Each caller's requests by due time, bounded in requests, tokens and seconds.

    The limits on tokens and seconds apply only if the caller has other requests in the queue; a first request of any
    size is accepted.
    """

    def __init__(self, max_requests: int, max_tokens: int, max_seconds: float = math.inf) -> None:
        self.max_requests, self.max_seconds = max_requests, max_seconds
        self._requests, self._tokens = FairBound(max_requests), FairBound(max_tokens)
        self._waiting: dict[str, _Waiting] = {}
        self._lines: dict[str, list[_Waiting]] = {}  # by caller, earliest due time first
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    @property
    def num_tokens(self) -> int:
        """Maximum number of tokens, of prompts and outputs, of all requests together."""
        return self._tokens.total

    @property
    def callers(self) -> tuple[str, ...]:
        return tuple(self._lines)

    @property
    def usage(self) -> float:
        """Share of the limit in requests or in tokens, whichever is larger; above 1 with an oversized request."""
        return max(bound.total / bound.limit for bound in (self._requests, self._tokens))

    def require_room(self, caller: str = "", num_tokens: int = 0, outlook: Outlook = NOTHING_KNOWN) -> None:
        """Raise QueueFull if a request of `num_tokens` exceeds a limit of the queue."""
        if not self._requests.has_room(caller):
            problem = f"the queue holds {len(self)} requests; the limit is {self.max_requests}"
            raise QueueFull(problem, bound="requests", retry_seconds=outlook.retry)
        if caller not in self._lines:
            return
        if not self._tokens.has_room(caller, num_tokens):
            held = f"the queue holds {self.num_tokens} tokens and the request may need {num_tokens}"
            problem = f"{held}; the limit is {self._tokens.limit}"
            raise QueueFull(problem, bound="tokens", retry_seconds=outlook.retry)
        longest = max(self.max_seconds, SERVICE_SHARE * outlook.service)
        if outlook.wait > longest:
            problem = f"a request would wait for {outlook.wait:.3g} seconds; the limit is {longest:.3g}"
            raise QueueFull(problem, bound="seconds", retry_seconds=outlook.retry)

    def push(self, request: Request, num_tokens: int, due: float, outlook: Outlook = NOTHING_KNOWN) -> None:
        """Add a request, or raise QueueFull. `due` is in seconds; all requests use the same clock."""
        assert request.request_id not in self._waiting, "the driver refuses live ids"
        self.require_room(request.caller, num_tokens, outlook)
        entry = _Waiting(due, next(self._numbers), request, num_tokens)
        self._waiting[request.request_id] = entry
        insort(self._lines.setdefault(request.caller, []), entry)
        self._count(entry, 1)

    def pop(self, caller: str = "") -> Request:
        """Remove and return the request of `caller` that is due first."""
        request = self._lines[caller][0].request
        self.remove(request.request_id)
        return request

    def remove(self, request_id: str) -> bool:
        """Remove a request at any position; return whether it was in the queue."""
        entry = self._waiting.pop(request_id, None)
        if entry is None:
            return False
        self._count(entry, -1)
        line = self._lines[entry.request.caller]
        line.remove(entry)
        if not line:
            del self._lines[entry.request.caller]
        return True

    def ahead(self, due: float, caller: str = "") -> list[Request]:
        """Return the requests of `caller` that start before a new one with this due time."""
        line = self._lines.get(caller, [])
        return [entry.request for entry in line[: bisect_right(line, due, key=attrgetter("due"))]]

    def _count(self, entry: _Waiting, change: int) -> None:
        self._requests.add(entry.request.caller, change)
        self._tokens.add(entry.request.caller, change * entry.num_tokens)
