"""The bounded queue before the engine. It uses only the size and the due time of each request."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from itertools import count

from engine.types import Request
from server.errors import QueueFull

SERVICE_SHARE = 0.1  # every request may wait for this share of the current service time, if `max_seconds` is less


@dataclass(frozen=True, slots=True)
class Outlook:
    """Estimated times for a request that arrives now, in seconds; an unknown time counts as zero."""

    wait: float = 0.0  # until it has a place in the batch
    service: float = 0.0  # from its start in the batch to its end
    retry: float = 1.0  # until a retry of a refused request can succeed


NOTHING_KNOWN = Outlook()


@dataclass(order=True, slots=True)
class _Waiting:
    due: float
    number: int  # order of arrival, for requests that are due at the same time
    request: Request = field(compare=False)
    num_tokens: int = field(compare=False)  # most tokens of prompt and output
    is_gone: bool = field(default=False, compare=False)


class AdmissionQueue:
    """Requests by due time, bounded in requests, tokens and seconds. A push, pop or remove costs O(log n).

    The bounds in tokens and seconds apply only if other requests wait: an empty queue accepts any request.
    """

    def __init__(self, max_requests: int, max_tokens: int, max_seconds: float = math.inf) -> None:
        self.max_requests, self.max_tokens, self.max_seconds = max_requests, max_tokens, max_seconds
        self.num_tokens = 0
        self._waiting: dict[str, _Waiting] = {}
        self._heap: list[_Waiting] = []  # removed entries stay until they are at the top, or until they are too many
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    @property
    def usage(self) -> float:
        """Share of the limit in requests or in tokens, whichever is larger. Above 1 if a large request waits alone."""
        return max(len(self) / self.max_requests, self.num_tokens / self.max_tokens)

    def require_room(self, num_tokens: int = 0, outlook: Outlook = NOTHING_KNOWN) -> None:
        """Raise QueueFull if a request of `num_tokens` exceeds a bound of the queue."""
        if len(self) >= self.max_requests:
            problem = f"the queue holds {len(self)} requests; the limit is {self.max_requests}"
            raise QueueFull(problem, bound="requests", retry_seconds=outlook.retry)
        if self._waiting and self.num_tokens + num_tokens > self.max_tokens:
            held = f"the queue holds {self.num_tokens} tokens and the request may need {num_tokens}"
            problem = f"{held}; the limit is {self.max_tokens}"
            raise QueueFull(problem, bound="tokens", retry_seconds=outlook.retry)
        longest = max(self.max_seconds, SERVICE_SHARE * outlook.service)
        if self._waiting and outlook.wait > longest:
            problem = f"a request would wait for {outlook.wait:.3g} seconds; the limit is {longest:.3g}"
            raise QueueFull(problem, bound="seconds", retry_seconds=outlook.retry)

    def push(self, request: Request, num_tokens: int, due: float, outlook: Outlook = NOTHING_KNOWN) -> None:
        """Add a request, or raise QueueFull. `due` is in seconds; all requests use the same clock."""
        assert request.request_id not in self._waiting, "the driver refuses live ids"
        self.require_room(num_tokens, outlook)
        entry = _Waiting(due, next(self._numbers), request, num_tokens)
        self._waiting[request.request_id] = entry
        heapq.heappush(self._heap, entry)
        self.num_tokens += num_tokens

    def pop(self) -> Request:
        """Remove and return the request that is due first."""
        while True:
            entry = heapq.heappop(self._heap)
            if not entry.is_gone:
                self._leave(entry)
                return entry.request

    def remove(self, request_id: str) -> bool:
        """Remove a request at any position; return whether it was in the queue."""
        entry = self._waiting.get(request_id)
        if entry is None:
            return False
        self._leave(entry)
        if len(self._heap) > 2 * len(self._waiting) + 8:
            self._heap = [waiting for waiting in self._heap if not waiting.is_gone]
            heapq.heapify(self._heap)
        return True

    def ahead(self, due: float) -> int:
        """Return the number of requests that would start before a new one that is due at `due`."""
        return sum(entry.due <= due for entry in self._waiting.values())

    def _leave(self, entry: _Waiting) -> None:
        entry.is_gone = True
        del self._waiting[entry.request.request_id]
        self.num_tokens -= entry.num_tokens
