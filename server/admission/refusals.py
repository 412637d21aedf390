"""When a refusal is answered. Whoever asks again at once would take the time in which others are served."""

from __future__ import annotations

import random

from server.admission.security import TokenBuckets
from server.errors import QueueFull

AT_ONCE = 20  # refusals of one caller that are answered at once, and per second after that
LONGEST = 2.0  # seconds for which an answer is held back
_SHARE = 0.5  # of the seconds that are left to the caller, which is to hear why


class Refusals:
    """The refusals of each caller, as far as they are recent."""

    def __init__(self) -> None:
        self._buckets = TokenBuckets(AT_ONCE)

    def delay(self, caller: str, error: QueueFull, remaining: float, now: float) -> float:
        """Count a refusal at `now`, and return for how many seconds its answer is held back.

        That is no longer than until a retry can succeed. Answers that would be held for longer than `LONGEST` come at
        random times before it, so that those to requests that arrived together do not come together.

        Args:
            caller: who is refused.
            error: the refusal.
            remaining: seconds until the caller's deadline.
            now: seconds, of any one clock.
        """
        self._buckets.forget_full(now)
        seconds = max(0.0, 1 - self._buckets.held(caller, now)) / AT_ONCE
        if seconds <= LONGEST:
            self._buckets.take(caller, 1, now)
        else:
            seconds = LONGEST * random.uniform(0.5, 1.0)  # noqa: S311  # no secret
        return max(0.0, min(seconds, error.retry_seconds, _SHARE * remaining))
