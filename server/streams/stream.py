"""The outputs of one request between the engine and the reader. Knows tokens and text, no protocol.

The driver writes, and one reader reads. Unread chunks are merged into one `Chunk` per output, so a slow reader gets
fewer and larger messages, and at most `n * max_tokens` tokens are buffered.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from engine.errors import PilotfishError
from engine.stats import Clock
from engine.text.codec import Codec, OutputText
from engine.text.stops import NO_ASIDES, Asides, StopStrings
from engine.types import Request, TokenEvent
from server.streams.output import NOTHING_RECEIVED, Chunk, OutputBuffer, ReceivedOutput, Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class SendOptions:
    """How the outputs of a request are sent.

    Args:
        interval: tokens to collect before a message is sent; the first message is sent at once.
        digests: send a digest of the tokens with each chunk.
        skip_special_tokens: special tokens have no text.
        asides: where stop strings are not looked for.
        received: what the caller has received of each output, if the request continues an interrupted stream.
        interruptions: how often the stream was interrupted before.
    """

    interval: int = 1
    digests: bool = False
    skip_special_tokens: bool = True
    asides: Asides = NO_ASIDES
    received: tuple[ReceivedOutput, ...] = ()
    interruptions: int = 0


SEND_DEFAULTS = SendOptions()


class OutputStream:
    """The outputs of one live request. Each output ends once, with a `Chunk` that has `end`, or an error ends all.

    If it continues an interrupted stream, `replay` comes before everything else.
    """

    def __init__(
        self, request: Request, codec: Codec | None, clock: Clock, options: SendOptions = SEND_DEFAULTS,
        deadline: float = math.inf,
    ) -> None:  # fmt: skip
        self.request, self.deadline = request, deadline  # in seconds of the clock
        self.timeline = Timeline(arrived=clock())
        sampling = request.sampling
        stops, skips = StopStrings(sampling.stop), options.skip_special_tokens
        texts = (
            None
            if codec is None
            else OutputText(codec, stops, sampling.min_tokens, skip_special_tokens=skips, asides=options.asides)
            for _ in range(sampling.n)
        )
        received = options.received or (NOTHING_RECEIVED,) * request.sampling.n
        self.outputs = tuple(
            OutputBuffer(
                index, text, self.timeline.arrived, clock, options.interval, before,
                digests=options.digests,
            )
            for index, (text, before) in enumerate(zip(texts, received, strict=True))
        )  # fmt: skip
        for output in self.outputs:
            output.interruptions = options.interruptions
        self.num_ends = sum(not output.has_ended for output in self.outputs)  # that the reader gets
        self._clock = clock
        self._error: PilotfishError | None = None
        self._readable = asyncio.Event()

    @property
    def request_id(self) -> str:
        """The id of the request."""
        return self.request.request_id

    @property
    def error(self) -> PilotfishError | None:
        """The error that ended the request; None if there is none."""
        return self._error

    @property
    def ended(self) -> bool:
        """Whether the driver will write nothing more."""
        return self._error is not None or all(output.has_ended for output in self.outputs)

    def continued(self) -> Request:
        """Return the request as an engine has to get it now: with what its outputs have emitted so far."""
        emitted = tuple(output.emitted for output in self.outputs)
        is_new = not any(output.token_ids or output.has_ended for output in emitted)
        return self.request if is_new else replace(self.request, emitted=emitted)

    def replay(self) -> Iterator[None]:
        """Take what the reader has received, in parts that take some milliseconds each; see `OutputBuffer.replay`."""
        for output in self.outputs:
            yield from output.replay()

    def trace(self, trace_id: str | None) -> None:
        """Set the trace of the request. Call it before the request starts."""
        for timeline in (self.timeline, *(output.timeline for output in self.outputs)):
            timeline.trace_id = trace_id

    # ----------------------------------------------------------------------------------------- the driver writes

    def start(self) -> None:
        """Record the start: the request is passed to the engine."""
        now = self._clock()
        for timeline in (self.timeline, *(output.timeline for output in self.outputs)):
            timeline.started = now

    def interrupt(self) -> None:
        """Record that the engine was lost, and that the request goes on with another one."""
        for output in self.outputs:
            output.interruptions += not output.has_ended

    def push(self, event: TokenEvent) -> bool:
        """Add one event to its output; return whether a stop string ended it, so that the engine has to end it too."""
        assert not self.ended, f"an event after the end of {self.request_id}"
        output = self.outputs[event.index]
        stopped = output.push(event)
        self._after(output)
        return stopped

    def fail(self, error: PilotfishError) -> None:
        """End every output with one error. The reader first gets all that is written, then `read` raises the error."""
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
        """Wait for new chunks and return them, at most one per output. Raises the error that ended the request."""
        await self._readable.wait()
        failed = self._error is not None
        found = tuple(output.take() for output in self.outputs if output.ready or (failed and output.has_unread))
        if self._error is not None and not found:
            raise self._error
        if not self.ended:
            self._readable.clear()
        return found

    async def read_all(self) -> tuple[Chunk, ...]:
        """Wait for the end, and return every output as one chunk, in the order of their indices."""
        parts: list[list[Chunk]] = [[] for _ in self.outputs]
        while not all(chunks and chunks[-1].end for chunks in parts):
            for chunk in await self.read():
                parts[chunk.index].append(chunk)
        return tuple(map(Chunk.merged, parts))
