"""One request's output on its way from the engine to its reader. Knows tokens and text, no protocol.

The driver writes, one reader reads. What is not yet read is merged into one `Chunk`, so a slow reader gets
fewer and larger messages, and never more than `max_tokens` tokens wait for it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from engine.errors import PilotfishError
from engine.stats import Clock
from engine.text import OutputText
from engine.types import Finished, FinishReason, Request, TokenEvent


@dataclass(slots=True)
class Timeline:
    """When things happened to a request, in seconds of the driver's clock; None if not yet."""

    arrived: float
    started: float | None = None  # handed to the engine
    first_token: float | None = None
    last_token: float | None = None
    ended: float | None = None


@dataclass(frozen=True, slots=True)
class End:
    """How an output ended: the engine's word on it, and what only the text layer knows."""

    finished: Finished
    stop_string: str | None
    timeline: Timeline


@dataclass(frozen=True, slots=True)
class Chunk:
    """What came since the last read. `texts[i]` came with `token_ids[i]`; `tail` was held back until the end."""

    token_ids: tuple[int, ...] = ()
    from_draft: tuple[bool, ...] = ()
    texts: tuple[str, ...] = ()
    tail: str = ""
    end: End | None = None

    @property
    def text(self) -> str:
        """All new text."""
        return "".join(self.texts) + self.tail


@dataclass(frozen=True, slots=True)
class StopHit:
    """A stop string completed: only the first `num_tokens` generated tokens count."""

    stop: str
    num_tokens: int


class OutputStream:
    """The output of one live request. Exactly one end: a `Chunk` with `end`, or a raised error."""

    def __init__(self, request: Request, text: OutputText | None, clock: Clock, interval: int = 1) -> None:
        self.request = request
        self.timeline = Timeline(arrived=clock())
        self.num_tokens = 0  # kept so far
        self._text, self._clock, self._interval = text, clock, interval
        self._token_ids: list[int] = []
        self._from_draft: list[bool] = []
        self._texts: list[str] = []
        self._tail = ""
        self.end: End | None = None
        self._error: PilotfishError | None = None
        self._stop_string: str | None = None
        self._readable = asyncio.Event()

    @property
    def request_id(self) -> str:
        """The id of its request."""
        return self.request.request_id

    @property
    def ended(self) -> bool:
        """Whether nothing more will be written."""
        return self.end is not None or self._error is not None

    # ----------------------------------------------------------------------------------------- the driver writes

    def push(self, event: TokenEvent) -> StopHit | None:
        """Take one step's tokens, and the end if it is there; what the engine has to be told, if text stopped it."""
        assert not self.ended, f"an event after the end of {self.request_id}"
        hit = self._keep(event)
        if event.finished is not None:
            self._finish(event.finished, hit)
            return None
        if self.num_tokens == len(self._token_ids) or len(self._token_ids) >= self._interval:
            self._readable.set()  # the first tokens of a request never wait for more
        return hit

    def close(self, finished: Finished) -> None:
        """Take the end by itself: a stop string that `push` found, a cancellation, an abort."""
        assert not self.ended, f"a second end of {self.request_id}"
        self._finish(finished, None)

    def fail(self, error: PilotfishError) -> None:
        """End with an error, which the reader gets raised after what is already written."""
        assert not self.ended, f"a second end of {self.request_id}"
        self.timeline.ended = self._clock()
        self._error = error
        self._readable.set()

    def _keep(self, event: TokenEvent) -> StopHit | None:
        ended_by_id = event.finished is not None and event.finished.stop_token_id is not None
        shown = event.token_ids[: len(event.token_ids) - ended_by_id]  # the token that ended it has no text
        texts, stop = ("",) * len(shown), None
        if self._text is not None:
            piece = self._text.push(shown)
            texts, stop = piece.texts, piece.stop
        if ended_by_id and stop is None:
            texts += ("",)
        self._append(event, texts)
        if stop is None:
            return None
        self._stop_string = stop
        return StopHit(stop, self.num_tokens)

    def _append(self, event: TokenEvent, texts: tuple[str, ...]) -> None:
        if not texts:
            return
        self._token_ids += event.token_ids[: len(texts)]
        self._from_draft += event.from_draft[: len(texts)]
        self._texts += texts
        self.num_tokens += len(texts)
        self.timeline.last_token = self._clock()
        if self.timeline.first_token is None:
            self.timeline.first_token = self.timeline.last_token

    def _finish(self, finished: Finished, hit: StopHit | None) -> None:
        if hit is not None:  # the engine ended it in the same step, but plain decoding would have stopped before
            finished = replace(
                finished, reason=FinishReason.STOP, completion_tokens=hit.num_tokens, stop_token_id=None, error=None
            )
        if self._text is not None:
            self._tail = self._text.flush()
        self.timeline.ended = self._clock()
        self.end = End(finished, self._stop_string, self.timeline)
        self._readable.set()

    # ------------------------------------------------------------------------------------------- the reader reads

    async def read(self) -> Chunk:
        """Wait for something new and take all of it; raises what the output failed with."""
        await self._readable.wait()
        if self._error is not None and not self._token_ids:
            raise self._error
        if not self.ended:
            self._readable.clear()
        chunk = Chunk(tuple(self._token_ids), tuple(self._from_draft), tuple(self._texts), self._tail, self.end)
        self._token_ids, self._from_draft, self._texts, self._tail = [], [], [], ""
        return chunk

    async def read_all(self) -> Chunk:
        """The whole output at once."""
        chunks = [await self.read()]
        while chunks[-1].end is None:
            chunks.append(await self.read())
        return Chunk(
            tuple(t for chunk in chunks for t in chunk.token_ids),
            tuple(d for chunk in chunks for d in chunk.from_draft),
            tuple(t for chunk in chunks for t in chunk.texts),
            chunks[-1].tail,
            chunks[-1].end,
        )
