"""When a refusal is answered. Whoever asks again at once would take the time in which others are served."""

from __future__ import annotations

import random

from server.errors import QueueFull

AT_ONCE = 20  # refusals of one caller that are answered at once, and per second after that
LONGEST = 2.0  # seconds for which an answer is held back
_SHARE = 0.5  # of the seconds that are left to the caller, which is to hear why


class Refusals:
    """A token bucket for each caller that was refused of late."""

    def __init__(self) -> None:
        self._due: dict[str, float] = {}  # by caller: when its latest refusal is answered, at a steady rate

    def delay(self, caller: str, error: QueueFull, remaining: float, now: float) -> float:
        """Count a refusal at `now`; return for how many seconds it is held back: never until a retry can succeed.

        What came together and would be held for longer than the longest time is answered at random times before it.

        Args:
            caller: who is refused.
            error: the refusal.
            remaining: seconds until the caller's deadline.
            now: seconds, of any one clock.
        """
        self._due = {other: due for other, due in self._due.items() if due > now - 1}
        due = self._due.get(caller, now - 1) + 1 / AT_ONCE
        self._due[caller] = min(due, now + LONGEST)
        if due > now + LONGEST:
            due = now + LONGEST * random.uniform(0.5, 1.0)  # noqa: S311  # no secret
        return max(0.0, min(due - now, error.retry_seconds, _SHARE * remaining))
