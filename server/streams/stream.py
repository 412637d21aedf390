"""The outputs of one request, on their way from the engine to its reader. Knows tokens and text, no protocol.

The driver writes, one reader reads. What is not yet read is merged into one `Chunk` per output, so a slow reader
gets fewer and larger messages, and never more than `n * max_tokens` tokens wait for it.
"""

from __future__ import annotations

import asyncio
import math

from engine.errors import PilotfishError
from engine.stats import Clock
from engine.text.codec import Codec, OutputText
from engine.types import Request, TokenEvent
from server.streams.output import Chunk, OutputBuffer, Timeline


class OutputStream:
    """The outputs of one live request. Each ends once, in a `Chunk` with `end`; or an error ends them all."""

    def __init__(
        self, request: Request, codec: Codec | None, clock: Clock, interval: int = 1, deadline: float = math.inf
    ) -> None:
        self.request, self.deadline = request, deadline  # in seconds of the clock
        self.timeline = Timeline(arrived=clock())
        self.outputs = tuple(
            OutputBuffer(index, _text(request, codec), self.timeline.arrived, clock, interval)
            for index in range(request.sampling.n)
        )
        self._clock = clock
        self._error: PilotfishError | None = None
        self._readable = asyncio.Event()

    @property
    def request_id(self) -> str:
        """The id of its request."""
        return self.request.request_id

    @property
    def error(self) -> PilotfishError | None:
        """What it failed with, if it did."""
        return self._error

    @property
    def ended(self) -> bool:
        """Whether nothing more will be written."""
        return self._error is not None or all(output.end is not None for output in self.outputs)

    def trace(self, trace_id: str | None) -> None:
        """Say which trace it is part of; to be called before anything happens to it."""
        for timeline in (self.timeline, *(output.timeline for output in self.outputs)):
            timeline.trace_id = trace_id

    # ----------------------------------------------------------------------------------------- the driver writes

    def start(self) -> None:
        """The engine has the request from now on."""
        now = self._clock()
        for timeline in (self.timeline, *(output.timeline for output in self.outputs)):
            timeline.started = now

    def push(self, event: TokenEvent) -> bool:
        """Add one event to its output; return whether a stop string ended it, so that the engine has to end it too."""
        assert not self.ended, f"an event after the end of {self.request_id}"
        output = self.outputs[event.index]
        stopped = output.push(event)
        self._after(output)
        return stopped

    def fail(self, error: PilotfishError) -> None:
        """End every output with one error, which the reader gets raised after what is already written."""
        assert not self.ended, f"a second end of {self.request_id}"
        self.timeline.ended = self._clock()
        self._error = error
        self._readable.set()

    def _after(self, output: OutputBuffer) -> None:
        if self.ended:
            self.timeline.ended = self._clock()
        if output.ready:
            self._readable.set()

    # ------------------------------------------------------------------------------------------- the reader reads

    async def read(self) -> tuple[Chunk, ...]:
        """Wait for something new and take it, at most one chunk per output; raises what the request failed with."""
        await self._readable.wait()
        failed = self._error is not None
        found = tuple(output.take() for output in self.outputs if output.ready or (failed and output.has_unread))
        if self._error is not None and not found:
            raise self._error
        if not self.ended:
            self._readable.clear()
        return found

    async def read_all(self) -> tuple[Chunk, ...]:
        """Every output whole, in the order of their indices."""
        parts: list[list[Chunk]] = [[] for _ in self.outputs]
        while not all(chunks and chunks[-1].end for chunks in parts):
            for chunk in await self.read():
                parts[chunk.index].append(chunk)
        return tuple(map(Chunk.merged, parts))


def _text(request: Request, codec: Codec | None) -> OutputText | None:
    sampling = request.sampling
    return None if codec is None else OutputText(codec, sampling.stop, sampling.min_tokens)
