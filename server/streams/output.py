"""The buffer of one output between the engine and the reader; unread chunks are merged. Knows no requests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypeVar

from engine.stats import Clock
from engine.text.codec import OutputText
from engine.types import FinishedOutput, FinishReason, Logprob, TokenEvent

T = TypeVar("T")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """New tokens and text of one output since the last read.

    `texts[i]` and, if requested, `logprobs[i]` belong to token i. `tail` is text that was held back until the end.
    """

    index: int
    token_ids: tuple[int, ...] = ()
    from_draft: tuple[bool, ...] = ()
    texts: tuple[str, ...] = ()
    logprobs: tuple[Logprob, ...] = ()
    prompt_logprobs: tuple[Logprob | None, ...] = ()
    tail: str = ""
    end: End | None = None

    @property
    def text(self) -> str:
        """The new text as one string."""
        return "".join(self.texts) + self.tail

    @classmethod
    def merged(cls, parts: list[Chunk]) -> Chunk:
        """Merge successive chunks of one output."""
        if len(parts) == 1:  # the usual case: the reader keeps up
            return parts[0]
        return cls(
            index=parts[0].index,
            token_ids=_joined(part.token_ids for part in parts),
            from_draft=_joined(part.from_draft for part in parts),
            texts=_joined(part.texts for part in parts),
            logprobs=_joined(part.logprobs for part in parts),
            prompt_logprobs=_joined(part.prompt_logprobs for part in parts),
            tail="".join(part.tail for part in parts),
            end=parts[-1].end,
        )


def _joined(parts: Iterable[tuple[T, ...]]) -> tuple[T, ...]:
    return tuple(chain.from_iterable(parts))


class OutputBuffer:
    """Unread tokens of one output, cut after a stop string.

    The first tokens are readable at once; later ones are readable when `interval` tokens are unread, or at the end.
    """

    def __init__(self, index: int, text: OutputText | None, arrived: float, clock: Clock, interval: int) -> None:
        self.index, self.timeline = index, Timeline(arrived)
        self.num_tokens = 0  # of the output so far, up to a stop string
        self.end: End | None = None
        self._text, self._clock, self._interval = text, clock, interval
        self._unread: list[Chunk] = []
        self._num_unread = 0  # tokens
        self._stop_string: str | None = None

    @property
    def ready(self) -> bool:
        """Whether the reader should get the unread chunks now."""
        first = 0 < self.num_tokens == self._num_unread
        return bool(self._unread) and (first or self._num_unread >= self._interval or self.end is not None)

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string has ended the text; later tokens are ignored."""
        return self._stop_string is not None

    @property
    def has_unread(self) -> bool:
        """Whether any chunk is unread."""
        return bool(self._unread)

    def push(self, event: TokenEvent) -> bool:
        """Add the tokens of one step, and the end if the event has one.

        Returns:
            Whether a stop string ended the output now, so that the caller has to end it in the engine.
        """
        assert self.end is None, f"an event after the end of output {self.index}"
        is_late = self.is_stopped  # the engine took another step before it was told to stop
        stop = is_late or self._keep(event)
        if event.finished is None:
            return stop and not is_late
        # The engine ended the output, but its text has a stop string earlier: plain decoding would have ended there.
        self.close(self._stopped(event.finished) if stop else event.finished)
        return False

    def close(self, finished: FinishedOutput) -> None:
        """Add the end of the output."""
        assert self.end is None, f"a second end of output {self.index}"
        tail = "" if self._text is None else self._text.flush()
        self.timeline.ended = self._clock()
        self.end = End(finished, self._stop_string, self.timeline)
        self._unread.append(Chunk(index=self.index, tail=tail, end=self.end))

    def take(self) -> Chunk:
        """Remove and return all unread chunks as one."""
        chunk = Chunk.merged(self._unread)
        self._unread, self._num_unread = [], 0
        return chunk

    def _keep(self, event: TokenEvent) -> bool:
        """Store the tokens up to a stop string; return whether one completed."""
        ended_by_id = event.finished is not None and event.finished.stop_token_id is not None
        shown = event.token_ids[: len(event.token_ids) - ended_by_id]  # a token that ends it by id has no text
        texts, stop = ("",) * len(shown), None
        if self._text is not None:
            piece = self._text.push(shown)
            texts, stop = piece.texts, piece.stop
        if ended_by_id and stop is None:
            texts += ("",)
        self._stop_string = stop
        if texts:
            self._store(event, texts)
        return stop is not None

    def _store(self, event: TokenEvent, texts: tuple[str, ...]) -> None:
        kept = len(texts)
        chunk = Chunk(
            index=self.index,
            token_ids=event.token_ids[:kept],
            from_draft=event.from_draft[:kept],
            texts=texts,
            logprobs=event.logprobs[:kept],
            prompt_logprobs=event.prompt_logprobs,
        )
        self._unread.append(chunk)
        self._num_unread += kept
        self.num_tokens += kept
        self.timeline.last_token = self._clock()
        if self.timeline.first_token is None:
            self.timeline.first_token = self.timeline.last_token

    def _stopped(self, finished: FinishedOutput) -> FinishedOutput:
        return replace(
            finished, reason=FinishReason.STOP, completion_tokens=self.num_tokens, stop_token_id=None, error=None
        )
