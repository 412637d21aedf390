"""The outputs of one request between the engine and the reader, each with a buffer. Knows tokens and text, no protocol.

The driver writes, and one reader reads. Unread chunks are merged into one `Chunk` per output, so a slow reader gets
fewer and larger messages, and at most `n * max_tokens` tokens are buffered.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from engine.errors import PilotfishError
from engine.stats import Clock
from engine.text.codec import Codec, OutputText
from engine.text.stops import NO_ASIDES, Asides, StopStrings
from engine.types import EmittedOutput, FinishedOutput, FinishReason, Logprob, Request, TokenEvent
from server.errors import ResumeRefused


@dataclass(slots=True)
class Timeline:
    """Times of events of a request or of one of its outputs, in seconds of the driver's clock; None if not yet."""

    arrived: float
    started: float | None = None  # passed to the engine
    first_token: float | None = None
    last_token: float | None = None
    ended: float | None = None
    trace_id: str | None = None  # 32 hexadecimal digits; None if the request is not traced


@dataclass(frozen=True, slots=True)
class End:
    """The end of an output: the engine's result, and the stop string, which only the text layer knows."""

    finished: FinishedOutput
    stop_string: str | None
    timeline: Timeline
    interruptions: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedOutput:
    """What the caller of an interrupted stream has received of an output: its tokens, or only their number.

    `ended_by_id`: the last of `token_ids` ends the output and has no text. `digest` is that of the first `num_tokens`
    tokens; if it is empty, nothing is compared. `tail`: the text that was held back until the end was received.
    `recount`: its end was received, but not kept: the output ends again after these tokens.
    """

    token_ids: tuple[int, ...] = ()
    ended_by_id: bool = False
    num_tokens: int = 0  # how many are computed again and not sent again
    digest: str = ""
    tail: bool = False
    has_ended: bool = False
    recount: bool = False


NOTHING_RECEIVED = ReceivedOutput()
_REPLAYED = 256  # tokens of a part
_OWN_ENDS = (FinishReason.STOP, FinishReason.LENGTH)


_PER_TOKEN = ("token_ids", "from_draft", "texts", "logprobs", "prompt_logprobs")  # fields of a chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """New tokens and text of one output since the last read.

    `texts[i]` and, if requested, `logprobs[i]` belong to token i. `tail` is text that was held back until the end.
    `digest` is that of all tokens of the output up to here; `text_offset` counts the characters before these.
    """

    index: int
    token_ids: tuple[int, ...] = ()
    from_draft: tuple[bool, ...] = ()
    texts: tuple[str, ...] = ()
    logprobs: tuple[Logprob, ...] = ()
    prompt_logprobs: tuple[Logprob | None, ...] = ()
    tail: str = ""
    end: End | None = None
    digest: str = ""
    text_offset: int = 0

    @property
    def text(self) -> str:
        """The new text as one string."""
        return "".join(self.texts) + self.tail

    @classmethod
    def merged(cls, parts: list[Chunk]) -> Chunk:
        if len(parts) == 1:  # the usual case: the reader keeps up
            return parts[0]
        first, last = parts[0], parts[-1]
        lists: Any = {name: tuple(chain.from_iterable(getattr(part, name) for part in parts)) for name in _PER_TOKEN}
        digest = next((part.digest for part in reversed(parts) if part.digest), "")
        return replace(first, tail="".join(part.tail for part in parts), end=last.end, digest=digest, **lists)


@dataclass(frozen=True, slots=True, kw_only=True)
class SendOptions:
    """How the outputs of a request are sent."""

    interval: int = 1  # tokens to collect before a message is sent; the first message is sent at once
    digests: bool = False  # send a digest of the tokens with each chunk
    skip_special_tokens: bool = True  # special tokens have no text
    asides: Asides = NO_ASIDES  # where stop strings are not looked for
    # what the caller has received of each output, if the request continues an interrupted stream
    received: tuple[ReceivedOutput, ...] = ()
    interruptions: int = 0  # how often the stream was interrupted before


SEND_DEFAULTS = SendOptions()


class OutputBuffer:
    """Unread tokens of one output, cut after a stop string.

    The first tokens are readable at once; later ones are readable when `interval` tokens are unread, or at the end.
    What was `received` on another server enters the text and the counts, and is not readable.
    """

    def __init__(
        self, index: int, text: OutputText | None, arrived: float, clock: Clock, options: SendOptions
    ) -> None:  # fmt: skip
        received = options.received[index] if options.received else NOTHING_RECEIVED
        self.index, self.timeline = index, Timeline(arrived)
        self.token_ids = array("I")  # of the output so far, up to a stop string
        self.end: End | None = None
        self.interruptions = options.interruptions
        self._text, self._clock, self._interval, self._received = text, clock, options.interval, received
        self._hash = hashlib.blake2b(digest_size=8) if options.digests or received.digest else None
        self._unread: list[Chunk] = []
        self._num_unread = 0  # tokens
        self._is_first = True  # whether the reader has taken nothing yet
        self._text_length = 0  # characters that the reader has, or can read
        self._stop_string: str | None = None

    def replay(self) -> Iterator[None]:
        """Take the tokens that the reader has, in parts. Their text was sent, as far as it is certain.

        Raises ResumeRefused if their digest is another one.
        """
        tokens = self._received.token_ids
        with_text = len(tokens) - self._received.ended_by_id
        for start in range(0, with_text, _REPLAYED):
            part = tokens[start : min(start + _REPLAYED, with_text)]
            if self._text is not None:
                piece = self._text.push(part)
                self._stop_string, self._text_length = piece.stop, self._text_length + len(piece.text)
                part = part[: len(piece.texts)]
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
        """Whether nothing more is written: its end was written, or was received on another server."""
        return self.end is not None or self._received.has_ended

    @property
    def emitted(self) -> EmittedOutput:
        """What an engine needs to continue the output."""
        return EmittedOutput(token_ids=tuple(self.token_ids), has_ended=self.has_ended)

    @property
    def ready(self) -> bool:
        """Whether the reader should get the unread chunks now."""
        return bool(self._unread) and (self._is_first or self._num_unread >= self._interval or self.end is not None)

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string has ended the text, or the reader has all of it; later tokens are ignored."""
        has_all = self._received.recount and self.num_tokens >= self._received.num_tokens
        return has_all or self._stop_string is not None

    @property
    def has_unread(self) -> bool:
        return bool(self._unread)

    def push(self, event: TokenEvent) -> bool:
        """Add the tokens of a step, and its end; return whether a stop string ended it, so the engine has to, too."""
        assert not self.has_ended, f"an event after the end of output {self.index}"
        is_late = self.is_stopped  # the engine took another step before it was told to stop
        stop = is_late or self._keep(event)
        if event.finished is None:
            return stop and not is_late
        if event.finished.reason in _OWN_ENDS and self.num_tokens < self._received.num_tokens:
            raise ResumeRefused(f"output {self.index} ends after {self.num_tokens} tokens here; more were received")
        # The engine ended the output, but its text has a stop string earlier: plain decoding would have ended there.
        is_cut = stop and (self._stop_string is not None or self.num_tokens < event.finished.completion_tokens)
        self.close(self._stopped(event.finished) if is_cut else event.finished)
        return False

    def close(self, finished: FinishedOutput) -> None:
        assert not self.has_ended, f"a second end of output {self.index}"
        tail = "" if self._text is None else self._text.flush()
        if self._stop_string is None and self._text is not None and self._text.stop is not None:  # only the end told
            self._stop_string = self._text.stop
            finished = self._stopped(finished) if finished.reason in _OWN_ENDS else finished
        tail = "" if self._received.tail else tail
        self.timeline.ended = self._clock()
        self.end = End(finished, self._stop_string, self.timeline, self.interruptions)
        self._unread.append(Chunk(index=self.index, tail=tail, end=self.end, text_offset=self._text_length))

    def take(self) -> Chunk:
        chunk = Chunk.merged(self._unread)
        self._unread, self._num_unread, self._is_first = [], 0, False
        return chunk

    def _keep(self, event: TokenEvent) -> bool:
        """Store the tokens up to a stop string; return whether one completed. Raises ResumeRefused, see `_count`."""
        tokens = event.token_ids
        if self._received.recount:
            tokens = tokens[: self._received.num_tokens - self.num_tokens]
        is_whole = len(tokens) == len(event.token_ids)
        ended_by_id = is_whole and event.finished is not None and event.finished.stop_token_id is not None
        shown = tokens[: len(tokens) - ended_by_id]  # a token that ends it by id has no text
        texts, stop = ("",) * len(shown), None
        if self._text is not None:
            piece = self._text.push(shown)
            texts, stop = piece.texts, piece.stop
        if ended_by_id and stop is None:
            texts += ("",)
        self._stop_string = stop
        if texts:
            self._store(event, texts)
        return self.is_stopped

    def _store(self, event: TokenEvent, texts: tuple[str, ...]) -> None:
        kept = len(texts)
        known = min(kept, max(0, self._received.num_tokens - self.num_tokens))  # computed again, not sent again
        self._count(event.token_ids[:kept])
        self.timeline.last_token = self._clock()
        if self.timeline.first_token is None:
            self.timeline.first_token = self.timeline.last_token
        known_text = sum(map(len, texts[:known]))
        offset, self._text_length = self._text_length + known_text, self._text_length + sum(map(len, texts))
        if known == kept:
            return
        chunk = Chunk(
            index=self.index,
            token_ids=event.token_ids[known:kept],
            from_draft=event.from_draft[known:kept],
            texts=texts[known:],
            logprobs=event.logprobs[known:kept],
            prompt_logprobs=() if known else event.prompt_logprobs,
            digest="" if self._hash is None else self._hash.hexdigest(),
            text_offset=offset,
        )
        self._unread.append(chunk)
        self._num_unread += kept - known

    def _count(self, tokens: Sequence[int]) -> None:
        """Append tokens to the output. Raises ResumeRefused if those that the caller received were others."""
        self.token_ids.extend(tokens)
        if self._hash is None:
            return
        until = self._received.num_tokens - (self.num_tokens - len(tokens))  # of `tokens`: where the digest is compared
        for i, token in enumerate(tokens, 1):
            self._hash.update(token.to_bytes(4, "little"))
            if i == until and self._received.digest not in ("", self._hash.hexdigest()):
                problem = f"the {self._received.num_tokens} tokens of output {self.index} are not those that were sent"
                raise ResumeRefused(f"{problem}: they cannot be computed again here")

    def _stopped(self, finished: FinishedOutput) -> FinishedOutput:
        return replace(
            finished, reason=FinishReason.STOP, completion_tokens=self.num_tokens, stop_token_id=None, error=None
        )


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
        self.outputs = tuple(
            OutputBuffer(index, text, self.timeline.arrived, clock, options) for index, text in enumerate(texts)
        )
        self._timelines = (self.timeline, *(output.timeline for output in self.outputs))
        self.num_ends = sum(not output.has_ended for output in self.outputs)  # that the reader gets
        self._clock = clock
        self.error: PilotfishError | None = None
        self._readable = asyncio.Event()

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def ended(self) -> bool:
        """Whether the driver will write nothing more."""
        return self.error is not None or all(output.has_ended for output in self.outputs)

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
        for timeline in self._timelines:
            timeline.trace_id = trace_id

    # ----------------------------------------------------------------------------------------- the driver writes

    def start(self) -> None:
        """Record the start: the request is passed to the engine."""
        now = self._clock()
        for timeline in self._timelines:
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
        if all(output.has_ended for output in self.outputs):
            self.timeline.ended = self._clock()
        if output.ready:
            self._readable.set()
        return stopped

    def fail(self, error: PilotfishError) -> None:
        """End every output with one error. The reader first gets all that is written, then `read` raises the error."""
        assert not self.ended, f"a second end of {self.request_id}"
        self.timeline.ended = self._clock()
        self.error = error
        self._readable.set()

    # ------------------------------------------------------------------------------------------- the reader reads

    async def read(self) -> tuple[Chunk, ...]:
        """Wait for new chunks and return them, at most one per output. Raises the error that ended the request."""
        await self._readable.wait()
        failed = self.error is not None
        found = tuple(output.take() for output in self.outputs if output.ready or (failed and output.has_unread))
        if self.error is not None and not found:
            raise self.error
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
