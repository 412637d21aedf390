"""The bounded queue before the engine. Knows requests and their sizes, not what they ask."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from engine.types import Request
from server.errors import QueueFull


@dataclass(frozen=True, slots=True)
class _Waiting:
    request: Request
    num_tokens: int  # of prompt and output, at most


class AdmissionQueue:
    """First come, first served; bounded in requests and in tokens. Push, pop and remove take constant time.

    The bound in tokens is about waiting behind others: an empty queue takes a request of any size.
    """

    def __init__(self, max_requests: int, max_tokens: int, retry_seconds: float = 1.0) -> None:
        self.max_requests, self.max_tokens, self._retry_seconds = max_requests, max_tokens, retry_seconds
        self.num_tokens = 0
        # Not a plain dict: taking the first of those again and again walks over the holes that it leaves.
        self._waiting: OrderedDict[str, _Waiting] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def push(self, request: Request, num_tokens: int) -> None:
        """Add to the end, or raise QueueFull."""
        assert request.request_id not in self._waiting, "the driver refuses live ids"
        if len(self) >= self.max_requests:
            raise self._full("requests", f"the queue holds {len(self)} requests; the limit is {self.max_requests}")
        if self._waiting and self.num_tokens + num_tokens > self.max_tokens:
            held = f"the queue holds {self.num_tokens} tokens and the request may need {num_tokens}"
            raise self._full("tokens", f"{held}; the limit is {self.max_tokens}")
        self._waiting[request.request_id] = _Waiting(request, num_tokens)
        self.num_tokens += num_tokens

    def pop(self) -> Request:
        """Take the first."""
        _, first = self._waiting.popitem(last=False)
        self.num_tokens -= first.num_tokens
        return first.request

    def remove(self, request_id: str) -> bool:
        """Take one out, wherever it stands; whether it was there."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is None:
            return False
        self.num_tokens -= waiting.num_tokens
        return True

    def _full(self, bound: str, problem: str) -> QueueFull:
        return QueueFull(problem, bound=bound, retry_seconds=self._retry_seconds)
