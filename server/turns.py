"""Whose turn it is: which caller's request the engine gets next, and how long one that arrives now will wait for it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.types import Request
from server.estimates import Estimates, sure_tokens
from server.model import EngineView
from server.queue import AdmissionQueue, Outlook
from server.streams.stream import OutputStream


def max_len_of(request: Request, engine: EngineView) -> int:
    """Return the most tokens of a request's prompt and of an output."""
    return request.max_len(engine.max_model_len, engine.config.max_output_tokens)


@dataclass(slots=True)
class _Running:
    """The outputs that the engine has: request and number of tokens of each."""

    outputs: list[tuple[Request, int]]
    held: Counter[str] = field(default_factory=Counter)  # how many, by caller
    unserved: set[str] = field(default_factory=set)  # callers of whom one has no token yet

    def add(self, request: Request, tokens: int) -> None:
        self.outputs.append((request, tokens))
        self.held[request.caller] += 1
        if not tokens:
            self.unserved.add(request.caller)


class CallerTurns:
    """Callers in the queue and in the engine. Each can have an equal part of the places, however many requests wait."""

    def __init__(self, queue: AdmissionQueue, engine: EngineView, live: Mapping[str, OutputStream]) -> None:
        self._queue, self._engine, self._live = queue, engine, live
        self._running: _Running | None = None  # None: to be computed
        self._outlooks: dict[str, Outlook] = {}  # by caller: hundreds may be refused between two steps

    def renew(self) -> None:
        """Outputs have got tokens, or have ended."""
        self._running = None
        self.requests_changed()

    def requests_changed(self) -> None:
        """Requests have come or gone."""
        self._outlooks.clear()

    def start(self, stream: OutputStream) -> None:
        """The engine gets a request."""
        self.requests_changed()
        for index in stream.request.unfinished:
            self._now.add(stream.request, stream.outputs[index].num_tokens)

    def next(self) -> str | None:
        """Return whose request the engine gets next, if any: the caller's of whom it has the fewest outputs.

        Without room it gets what may displace others: up to an equal part of the places. Beyond that it gets one
        request of each caller, so that it can give a free place to the one who has had the fewest tokens.
        """
        if not self._queue:
            return None
        now, waiting = self._now, sorted(self._queue.callers, key=self._now.held.__getitem__)
        if self._engine.has_room:
            return waiting[0]
        part = self._equal_part(waiting[0])
        return next((c for c in waiting if now.held[c] < part or (part and c not in now.unserved)), None)

    def outlook(self, caller: str, estimates: Estimates) -> Outlook:
        """Return the likely outlook of a new request of a caller, behind all its others."""
        if caller not in self._outlooks:
            self._outlooks[caller] = estimates.outlook(*self._before(caller, math.inf, estimates, likely=True))
        return self._outlooks[caller]

    def least_wait(self, caller: str, due: float, estimates: Estimates) -> float:
        """Return the fewest seconds until a request of a caller that is due at `due` can have a place."""
        return estimates.wait(*self._before(caller, due, estimates, likely=False), likely=False)

    def _before(
        self, caller: str, due: float, estimates: Estimates, *, likely: bool
    ) -> tuple[list[float], list[float]]:
        """Return the tokens left of running and of waiting outputs before a request of a caller; none if it can start.

        It can while its caller has less than an equal part of the places: others' requests do not come before it then.
        Else it is likely to get the place of an output of its caller's, and may get any.
        """
        ahead, running = self._queue.ahead(due, caller), self._now
        waiting = [(request, 0) for request in ahead for _ in range(request.sampling.n)]
        if len(waiting) < max(self._free_places, self._equal_part(caller) - running.held[caller]):
            return [], []
        if likely and running.held[caller]:
            outputs = [output for output in running.outputs if output[0].caller == caller]
        else:
            outputs = running.outputs
        left, behind = (estimates.left(map(self._lengths, some), likely=likely) for some in (outputs, waiting))
        return left, behind

    def _lengths(self, output: tuple[Request, int]) -> tuple[int, int, int]:
        """Return an output's number of tokens, the number that it has for certain, and the maximum."""
        request, tokens = output
        max_len = max_len_of(request, self._engine)
        return tokens, sure_tokens(request, max_len), max_len - len(request.token_ids)

    def _equal_part(self, caller: str) -> int:
        """Return the places that a caller can have beside the other live ones; 0 if there is no other one."""
        callers = {stream.request.caller for stream in self._live.values()} | {caller}
        return max(1, self._engine.config.max_batch_size // len(callers)) if len(callers) > 1 else 0

    @property
    def _free_places(self) -> int:
        """Outputs that can start before any other ends."""
        return self._engine.config.max_batch_size - self._engine.load.num_running if self._engine.has_room else 0

    @property
    def _now(self) -> _Running:
        if self._running is None:
            self._running = _Running([])
            for stream in self._live.values():
                if stream.timeline.started is not None:
                    for output in stream.outputs:
                        if not output.has_ended:
                            self._running.add(stream.request, output.num_tokens)
        return self._running
