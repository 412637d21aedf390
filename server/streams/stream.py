"""The outputs of one request between engine and reader, each with a buffer. Independent of the protocol.

The driver writes, and one reader reads. Unread events are merged into one per output, so a slow reader gets fewer and
larger messages, and at most `n * max_tokens` tokens are buffered.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from array import array
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from pilotfish.engine.errors import PilotfishError
from pilotfish.engine.stats import Clock
from pilotfish.engine.text.codec import Codec, OutputText
from pilotfish.engine.text.stops import NO_ASIDES, Asides, StopStrings
from pilotfish.engine.types import FinishedOutput, FinishReason, ReceivedOutput, Request, Resume, Timing, TokenEvent
from pilotfish.server.errors import ResumeRefused


@dataclass(slots=True)
class Timeline:
    """Times of events of a request or of one of its outputs, in seconds of the driver's clock; None if not yet."""

    arrived: float
    started: float | None = None  # passed to the engine
    first_token: float | None = None
    last_token: float | None = None
    ended: float | None = None
    trace_id: str | None = None  # 32 hexadecimal digits; None if the request is not traced

    @property
    def timing(self) -> Timing:
        """The durations of an output that has ended."""
        assert self.started is not None, "an end without a start"
        assert self.ended is not None, "not ended"
        first = None if self.first_token is None else self.first_token - self.arrived
        return Timing(queue=self.started - self.arrived, first_token=first, total=self.ended - self.arrived)


_REPLAYED = 256  # tokens of a part
_OWN_ENDS = (FinishReason.STOP, FinishReason.LENGTH)
_PER_TOKEN = ("token_ids", "from_draft", "texts", "logprobs", "prompt_logprobs")
NOTHING_RECEIVED = ReceivedOutput()
MAX_INTERRUPTIONS = 999_999  # that are counted


def merged(parts: list[TokenEvent]) -> TokenEvent:
    """Merge consecutive events of an output into one."""
    if len(parts) == 1:  # the usual case: the reader keeps up
        return parts[0]
    lists: Any = {name: tuple(chain.from_iterable(getattr(part, name) for part in parts)) for name in _PER_TOKEN}
    digest = next((part.digest for part in reversed(parts) if part.digest), "")
    tail = "".join(part.tail for part in parts)
    return parts[0]._replace(tail=tail, finished=parts[-1].finished, digest=digest, **lists)


class OutputBuffer:
    """Unread tokens of one output, cut after a stop string.

    The first tokens are readable immediately; later ones when `stream_interval` tokens are unread, or at the end.
    Tokens `received` from another server count and are part of the text, but are not readable.
    """

    def __init__(
        self, request: Request, index: int, text: OutputText | None, arrived: float, clock: Clock,
        end_token_ids: Collection[int],
    ) -> None:  # fmt: skip
        output, resume = request.output, request.resume
        received = resume.outputs[index] if resume is not None else NOTHING_RECEIVED
        self.index, self.timeline = index, Timeline(arrived)
        self.token_ids = array("I")  # tokens of the output so far, up to a stop string
        self.finished: FinishedOutput | None = None
        self.interruptions = 0 if resume is None else min(resume.interruptions + 1, MAX_INTERRUPTIONS)
        self._request, self._end_token_ids = request, end_token_ids
        self._text, self._clock, self._interval, self._received = text, clock, output.stream_interval, received
        self._hash = hashlib.blake2b(digest_size=8) if output.digests or received.digest else None
        self._unread: list[TokenEvent] = []
        self._num_unread = 0  # tokens
        self._is_first = True  # whether the reader has read nothing yet
        self._text_length = 0  # characters that the reader has read or can read
        self._stop_string: str | None = None

    def replay(self) -> Iterator[None]:
        """Add the tokens that the reader has received, in parts. Their text was sent, as far as it is certain.

        Raises ResumeRefused if their digest differs.
        """
        tokens = self._received.token_ids
        with_text = len(tokens) - (tokens[-1:] != () and tokens[-1] in self._end_token_ids)
        for start in range(0, with_text, _REPLAYED):
            part = tokens[start : min(start + _REPLAYED, with_text)]
            if self._text is not None:
                texts, self._stop_string = self._text.push(part), self._text.stop
                self._text_length += sum(map(len, texts))
                part = part[: len(texts)]
            self._count(part)
            if self.is_stopped:
                return
            yield
        self._count(tokens[with_text:])

    @property
    def num_tokens(self) -> int:
        """Tokens of the output so far, up to a stop string."""
        return len(self.token_ids)

    @property
    def has_ended(self) -> bool:
        """Whether the output is complete: its end was written here or received from another server."""
        return self.finished is not None or self._received.has_ended

    @property
    def ready(self) -> bool:
        """Whether the unread events should be read now."""
        is_due = self._is_first or self._num_unread >= self._interval or self.finished is not None
        return is_due and bool(self._unread)

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string has ended the text, or the reader has all of it; later tokens are ignored."""
        has_all = self._received.recount and self.num_tokens >= self._received.num_tokens
        return has_all or self._stop_string is not None

    @property
    def has_unread(self) -> bool:
        return bool(self._unread)

    def push(self, event: TokenEvent) -> bool:
        """Add the tokens of a step, and the end; return whether a stop string ended it, so the engine must end it."""
        assert not self.has_ended, f"an event after the end of output {self.index}"
        is_late = self.is_stopped  # the engine ran another step before the order to stop arrived
        stop = is_late or self._keep(event)
        if event.finished is None:
            return stop and not is_late
        if event.finished.reason in _OWN_ENDS and self.num_tokens < self._received.num_tokens:
            raise ResumeRefused(f"output {self.index} ends after {self.num_tokens} tokens; more were received")
        # The engine ended the output, but an earlier stop string ends its text: plain decoding would have ended there.
        is_cut = stop and (self._stop_string is not None or self.num_tokens < event.finished.completion_tokens)
        self.close(self._stopped(event.finished) if is_cut else event.finished)
        return False

    def close(self, finished: FinishedOutput) -> None:
        """Add the end, with its text, stop string and times."""
        assert not self.has_ended, f"a second end of output {self.index}"
        tail = "" if self._text is None else self._text.flush()
        if self._stop_string is None and self._text is not None and self._text.stop is not None:
            self._stop_string = self._text.stop  # only the end of the text completes it
            finished = self._stopped(finished) if finished.reason in _OWN_ENDS else finished
        tail = "" if self._received.tail else tail
        self.timeline.ended = self._clock()
        self.finished = replace(
            finished, stop_string=self._stop_string, timing=self.timeline.timing, interruptions=self.interruptions,
            stop_token_id=None if self._stop_string is not None else finished.stop_token_id,
        )  # fmt: skip
        self._unread.append(
            TokenEvent(
                self._request.request_id, self.index, finished=self.finished, tail=tail, text_offset=self._text_length
            )
        )

    def take(self) -> TokenEvent:
        event = merged(self._unread)
        self._unread, self._num_unread, self._is_first = [], 0, False
        return event

    def _keep(self, event: TokenEvent) -> bool:
        """Store the tokens up to a stop string; return whether one completed. Raises ResumeRefused, see `_count`."""
        tokens = event.token_ids
        if self._received.recount:
            tokens = tokens[: self._received.num_tokens - self.num_tokens]
        is_whole = len(tokens) == len(event.token_ids)
        ended_by_id = is_whole and event.finished is not None and event.finished.stop_token_id is not None
        shown = tokens[: len(tokens) - ended_by_id]  # a token that ends it by id has no text
        texts = ("",) * len(shown)
        if self._text is not None:
            texts, self._stop_string = self._text.push(shown), self._text.stop
        if ended_by_id and self._stop_string is None:
            texts += ("",)
        if texts:
            self._store(event, texts)
        return self.is_stopped

    def _store(self, event: TokenEvent, texts: tuple[str, ...]) -> None:
        kept = len(texts)
        known = min(kept, max(0, self._received.num_tokens - self.num_tokens))  # regenerated, not sent again
        self._count(event.token_ids[:kept])
        self.timeline.last_token = self._clock()
        if self.timeline.first_token is None:
            self.timeline.first_token = self.timeline.last_token
        known_text = sum(map(len, texts[:known]))
        offset, self._text_length = self._text_length + known_text, self._text_length + sum(map(len, texts))
        if known == kept:
            return
        unread = TokenEvent(
            self._request.request_id,
            self.index,
            token_ids=event.token_ids[known:kept],
            from_draft=event.from_draft[known:kept],
            texts=texts[known:],
            logprobs=event.logprobs[known:kept],
            prompt_logprobs=() if known else event.prompt_logprobs,
            digest="" if self._hash is None else self._hash.hexdigest(),
            text_offset=offset,
        )
        self._unread.append(unread)
        self._num_unread += kept - known

    def _count(self, tokens: Sequence[int]) -> None:
        """Append tokens to the output. Raises ResumeRefused if they differ from those that the caller received."""
        self.token_ids.extend(tokens)
        if self._hash is None:
            return
        until = self._received.num_tokens - (self.num_tokens - len(tokens))  # where the digest is compared
        for i, token in enumerate(tokens, 1):
            self._hash.update(token.to_bytes(4, "little"))
            if i == until and self._received.digest not in ("", self._hash.hexdigest()):
                problem = f"the {self._received.num_tokens} tokens of output {self.index} differ from those sent before"
                raise ResumeRefused(f"{problem}: this server cannot regenerate them")

    def _stopped(self, finished: FinishedOutput) -> FinishedOutput:
        return replace(
            finished, reason=FinishReason.STOP, completion_tokens=self.num_tokens, stop_token_id=None, error=None
        )


class OutputStream:
    """The outputs of one live request. Each output ends once, with an event that has `finished`, or an error ends all.

    Args:
        request: what is generated, with `skip_special_tokens` resolved.
        codec: turns tokens into text; None: the events have no text.
        clock: in seconds.
        asides: parts in which stop strings are not searched.
        deadline: in seconds of the clock.
        end_token_ids: tokens that end an output and have no text.
        starts_in_reasoning: the prompt ends within the model's reasoning.

    For a resumed stream, call `replay` before everything else. The front end that admitted the request calls `release`
    when its reader is gone, for any reason.
    """

    def __init__(
        self, request: Request, codec: Codec | None, clock: Clock, *, asides: Asides = NO_ASIDES,
        deadline: float = math.inf, end_token_ids: Collection[int] = (), starts_in_reasoning: bool = False,
    ) -> None:  # fmt: skip
        self.request, self.deadline, self.starts_in_reasoning = request, deadline, starts_in_reasoning
        self.timeline = Timeline(arrived=clock())
        self.released: Callable[[OutputStream, bool], None] = lambda _, __: None  # set at admission
        sampling, skips = request.sampling, request.output.skip_special_tokens is not False
        texts = (
            None
            if codec is None
            else OutputText(
                codec, StopStrings(sampling.stop), sampling.min_tokens, skip_special_tokens=skips, asides=asides
            )
            for _ in range(sampling.n)
        )
        self.outputs = tuple(
            OutputBuffer(request, index, text, self.timeline.arrived, clock, end_token_ids)
            for index, text in enumerate(texts)
        )
        self._timelines = (self.timeline, *(output.timeline for output in self.outputs))
        self._num_open = self._num_unread_ends = sum(not output.has_ended for output in self.outputs)
        self._clock = clock
        self.error: PilotfishError | None = None
        self._reader: asyncio.Future[None] | None = None  # in `read`

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def own_id(self) -> str:
        """The request's id without the caller's name."""
        return self.request_id.rpartition("/")[2]

    @property
    def ended(self) -> bool:
        """Whether the driver has finished writing."""
        return self.error is not None or not self._num_open

    def continued(self) -> Request:
        """Return the request for a restarted engine: with the tokens that its outputs have emitted."""
        emitted = tuple(
            ReceivedOutput(token_ids=tuple(output.token_ids), has_ended=output.has_ended) for output in self.outputs
        )
        is_new = not any(output.token_ids or output.has_ended for output in emitted)
        return replace(self.request, resume=None if is_new else Resume(outputs=emitted))

    def replay(self) -> Iterator[None]:
        """Add the tokens that the reader has received, a few milliseconds at a time; see `OutputBuffer.replay`."""
        for output in self.outputs:
            yield from output.replay()

    def trace(self, trace_id: str | None) -> None:
        """Set the trace of the request. Call it before the request starts."""
        for timeline in self._timelines:
            timeline.trace_id = trace_id

    # ----------------------------------------------------------------------------------------- the driver writes

    def start(self) -> None:
        """Record the start: the request is passed to the engine."""
        now = self._clock()
        for timeline in self._timelines:
            timeline.started = now

    def interrupt(self) -> None:
        """Record that the engine was lost and the request continues on another one."""
        for output in self.outputs:
            output.interruptions += not output.has_ended

    def push(self, event: TokenEvent) -> bool:
        """Add one event to its output; return whether a stop string ended it, so the engine must end it."""
        assert not self.ended, f"an event after the end of {self.request_id}"
        output = self.outputs[event.index]
        stopped = output.push(event)
        if output.has_ended:
            self._num_open -= 1
            if not self._num_open:
                self.timeline.ended = self._clock()
        if output.ready:
            self._wake_reader()
        return stopped

    def fail(self, error: PilotfishError) -> None:
        """End every output with one error. `read` first returns everything written, then raises the error."""
        assert not self.ended, f"a second end of {self.request_id}"
        self.timeline.ended = self._clock()
        self.error = error
        self._wake_reader()

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    # ------------------------------------------------------------------------------------------- the reader reads

    async def read(self) -> list[TokenEvent]:
        """Wait for new events and return them, at most one per output; none after the last end.

        Raises the error that ended the request.
        """
        while self._num_unread_ends:
            failed = self.error is not None
            found = [output.take() for output in self.outputs if output.ready or (failed and output.has_unread)]
            if found:
                self._num_unread_ends -= sum(event.finished is not None for event in found)
                return found
            if self.error is not None:
                raise self.error
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        return []

    async def events(self) -> AsyncGenerator[TokenEvent, None]:
        """Yield all events to the last end, each with tokens or an end. Raises the error that ended the request."""
        while found := await self.read():
            for event in found:
                end = event.finished
                if end is not None and (event.texts or event.tail):
                    yield event._replace(finished=None)
                    yield TokenEvent(request_id=event.request_id, index=event.index, finished=end)
                else:
                    yield event

    async def read_all(self) -> tuple[TokenEvent, ...]:
        """Wait for the end, and return every output as one event, in the order of their indices."""
        parts: list[list[TokenEvent]] = [[] for _ in self.outputs]
        async for event in self.events():
            parts[event.index].append(event)
        return tuple(map(merged, parts))

    def release(self, *, late: bool = False) -> None:
        """End the call after its reader is gone. `late`: because its deadline passed."""
        self.released(self, late)
