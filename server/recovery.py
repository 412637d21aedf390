"""Resubmits requests to a restarted engine, and finds the request that crashes it. Uses no engine and no clock.

A request that was running during two consecutive crashes becomes a suspect and runs without others. If the engine then
crashes twice in a row, the request is ended as the cause. A SIGKILL counts half, because a request can cause one only
by exhausting the memory. A request that gets past the point of the crash is cleared, and its count starts again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pilotfish.engine.params import MAX_PREDICTED_DRAFTS
from pilotfish.server.streams.stream import OutputStream

SUSPECT, GUILTY = 2, 2  # consecutive crashes until a request runs isolated; isolated crashes until it is ended
_KILLED = 0.5  # weight of a SIGKILL
CLEARING_TOKENS = MAX_PREDICTED_DRAFTS + 1  # more than the failed step could have generated, for every output


@dataclass(slots=True)
class _Record:
    """Consecutive crashes of the engine while one request was running."""

    tokens: tuple[int, ...] = ()  # of each output at the last crash
    crashes: int = 0
    isolated: float = 0.0  # crashes without other requests, weighted


class Recovery:
    """The requests of the failed engine that still have to be resubmitted."""

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}  # by request id
        self._waiting: dict[str, OutputStream] = {}  # not resubmitted yet, oldest first
        self._trial: OutputStream | None = None  # the suspect that runs isolated

    def __contains__(self, stream: OutputStream) -> bool:
        return stream.request_id in self._waiting

    @property
    def is_trying(self) -> bool:
        """Whether a suspect runs isolated, so that no other request may be submitted."""
        return self._trial is not None

    def crashed(self, running: Sequence[OutputStream], *, was_killed: bool = False) -> OutputStream | None:
        """Record a crash while these requests were running. Returns the one to end, if any; the others wait.

        `was_killed`: by a SIGKILL that this server did not send.
        """
        self._trial = None
        again = {stream.request_id: stream for stream in running}
        self._waiting = again | {name: stream for name, stream in self._waiting.items() if name not in again}
        for stream in running:
            record = self._records.get(stream.request_id)
            if record is None or self._is_cleared(stream):
                record = self._records[stream.request_id] = _Record()
            record.tokens = _tokens(stream)
            record.crashes += 1
            record.isolated = record.isolated + (_KILLED if was_killed else 1.0) if len(running) == 1 else 0.0
            if record.isolated >= GUILTY:
                del self._waiting[stream.request_id]
                return stream
        return None

    def num_crashes(self, stream: OutputStream) -> int:
        """Return the number of consecutive crashes while this request was running."""
        record = self._records.get(stream.request_id)
        return 0 if record is None else record.crashes

    def next(self) -> tuple[OutputStream | None, tuple[OutputStream, ...]]:
        """Return a cleared request that is to be paused for the next suspect, and the requests to submit now."""
        cleared = None
        if self._trial is not None and self._is_cleared(self._trial):
            del self._records[self._trial.request_id]
            if self._suspect() is not None:
                cleared = self._trial
                self._waiting[cleared.request_id] = cleared
            self._trial = None
        if self._trial is not None or not self._waiting:
            return cleared, ()
        self._trial = self._suspect()
        submitted = tuple(self._waiting.values()) if self._trial is None else (self._trial,)
        for stream in submitted:
            del self._waiting[stream.request_id]
        return cleared, submitted

    def take(self, stream: OutputStream) -> bool:
        """Remove a request from the waiting ones; return whether it was one of them."""
        return self._waiting.pop(stream.request_id, None) is not None

    def forget(self, stream: OutputStream) -> None:
        self._records.pop(stream.request_id, None)
        self._waiting.pop(stream.request_id, None)
        if self._trial is stream:
            self._trial = None

    def _suspect(self) -> OutputStream | None:
        return next((stream for stream in self._waiting.values() if self.num_crashes(stream) >= SUSPECT), None)

    def _is_cleared(self, stream: OutputStream) -> bool:
        """Whether every output has ended or is past the point of the crash."""
        now, then = _tokens(stream), self._records[stream.request_id].tokens
        pairs = zip(stream.outputs, now, then, strict=True)
        return all(output.has_ended or have - had >= CLEARING_TOKENS for output, have, had in pairs)


def _tokens(stream: OutputStream) -> tuple[int, ...]:
    return tuple(output.num_tokens for output in stream.outputs)
