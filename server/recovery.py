"""Which requests a restarted engine is fed again, and in what company: crashes are put down to requests.

A request that was in the engine at two crashes in a row is tried alone. If it brings the engine down alone, twice in a
row, it is guilty; a SIGKILL counts half, because a request can cause one only by using up the memory. A request that
has got further than where the engine failed is cleared: its next crash counts as a first one.
Knows no engine and no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.params import MAX_PREDICTED_DRAFTS
from server.streams.stream import OutputStream

SUSPECT, GUILTY = 2, 2  # crashes in a row: in company, after which a request is tried alone; and alone
_KILLED = 0.5  # how much of a crash a SIGKILL is
# Every output of a cleared request has so many more tokens than at the crash: what the failed step could have made.
CLEARING_TOKENS = MAX_PREDICTED_DRAFTS + 1


@dataclass(slots=True)
class _Record:
    """Crashes of the engine, in a row, with one request in it."""

    tokens: tuple[int, ...] = ()  # of each output at the last one
    crashes: int = 0
    alone: float = 0.0  # without company, weighed


class Recovery:
    """The requests that the failed engine had, until the next one has them again."""

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}  # by request id
        self._waiting: dict[str, OutputStream] = {}  # not fed again, oldest first
        self._tried: OutputStream | None = None

    def __contains__(self, stream: OutputStream) -> bool:
        return stream.request_id in self._waiting

    @property
    def is_trying(self) -> bool:
        """Whether one request runs alone, so that no other may be fed."""
        return self._tried is not None

    def crashed(self, running: Sequence[OutputStream], *, was_killed: bool = False) -> OutputStream | None:
        """Record a crash with these requests in the engine. All wait now, but the guilty one, which is returned.

        `was_killed`: by a SIGKILL that this server did not send.
        """
        self._tried = None
        again = {stream.request_id: stream for stream in running}
        self._waiting = again | {name: stream for name, stream in self._waiting.items() if name not in again}
        for stream in running:
            record = self._records.get(stream.request_id)
            if record is None or self._is_cleared(stream):
                record = self._records[stream.request_id] = _Record()
            record.tokens = _tokens(stream)
            record.crashes += 1
            record.alone = record.alone + (_KILLED if was_killed else 1.0) if len(running) == 1 else 0.0
            if record.alone >= GUILTY:
                del self._waiting[stream.request_id]
                return stream
        return None

    def num_crashes(self, stream: OutputStream) -> int:
        """Return the number of crashes in a row with this request in the engine."""
        record = self._records.get(stream.request_id)
        return 0 if record is None else record.crashes

    def next(self) -> tuple[OutputStream | None, tuple[OutputStream, ...]]:
        """Return the request whose trial is over and that makes room for the next trial, and those to be fed now."""
        acquitted = None
        if self._tried is not None and self._is_cleared(self._tried):
            del self._records[self._tried.request_id]
            if self._suspect() is not None:
                acquitted = self._tried
                self._waiting[acquitted.request_id] = acquitted
            self._tried = None
        if self._tried is not None or not self._waiting:
            return acquitted, ()
        self._tried = self._suspect()
        fed = tuple(self._waiting.values()) if self._tried is None else (self._tried,)
        for stream in fed:
            del self._waiting[stream.request_id]
        return acquitted, fed

    def take(self, stream: OutputStream) -> bool:
        """Remove a request from those that wait, because the caller feeds or ends it; return whether it waited."""
        return self._waiting.pop(stream.request_id, None) is not None

    def forget(self, stream: OutputStream) -> None:
        self._records.pop(stream.request_id, None)
        self._waiting.pop(stream.request_id, None)
        if self._tried is stream:
            self._tried = None

    def _suspect(self) -> OutputStream | None:
        return next((stream for stream in self._waiting.values() if self.num_crashes(stream) >= SUSPECT), None)

    def _is_cleared(self, stream: OutputStream) -> bool:
        """Whether every output has ended, or has got further than where the engine failed."""
        now, then = _tokens(stream), self._records[stream.request_id].tokens
        pairs = zip(stream.outputs, now, then, strict=True)
        return all(output.has_ended or have - had >= CLEARING_TOKENS for output, have, had in pairs)


def _tokens(stream: OutputStream) -> tuple[int, ...]:
    return tuple(output.num_tokens for output in stream.outputs)
