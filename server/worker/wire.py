"""Messages between the front-end process and the engine's process: length, then MessagePack. Knows no sockets.

Every message is one of the structs below, checked field by field when it is read. Nothing else can be said: no code, no
class names, no references, so whoever could write here could at most ask for tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import msgspec

from engine.config import Bounds
from engine.errors import PilotfishError
from engine.stats import StepStats
from engine.types import FinishedOutput, FinishReason, Logprob, Request, TokenEvent
from server.config import LogFormat

_LENGTH_BYTES = 4  # big-endian, of the payload that follows
_BASE_BYTES = 64 << 20  # a message without log-probabilities: prompts, structures, a step's tokens
_LOGPROB_BYTES = 64  # of one log-probability and its token, generously


class WireError(PilotfishError):
    """Unexpected: bytes that are no message, or too many of them. The other side cannot be believed any more."""


class Unsayable(PilotfishError):
    """Expected: a request that no message can hold: too large, or with what is no text. It is refused alone."""


# ------------------------------------------------------------------------------------------ from front ends to engine


class Start(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The first message: what to load and how to behave.

    Attributes:
        config: an `EngineConfig` as JSON.
        log_format: form of the log.
        beat_seconds: most seconds between two messages from the engine once it is ready and no step runs.
    """

    config: str
    log_format: LogFormat
    beat_seconds: float


class Add(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Take a checked request. `ticket` names it from now on, and never another; its structure is compiled again there.

    `order` counts all orders, so that a report of load can say which of them it includes.
    """

    order: int
    ticket: int
    request: Request


class Finish(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """End a request, or one of its outputs, before the next step; see `Engine.finish`. Its end comes as an event."""

    order: int
    ticket: int
    reason: FinishReason
    index: int | None = None
    keep: int | None = None


class Drop(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The same for a request whose reader is gone: no event of it is wanted."""

    order: int
    ticket: int
    reason: FinishReason


class Taken(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """One more `StepReport` has been taken up: another may be made."""


# ------------------------------------------------------------------------------------------ from engine to front ends


class Progress(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A stage of loading has begun."""

    stage: str


class Refused(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The models cannot be served (a `ModelError`); the process ends."""

    problem: str


class Ready(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Loaded and warm: what is true of this engine as long as it lives.

    Attributes:
        vocab_size: width of the target's logits.
        max_model_len: most tokens of prompt and output together.
        eos_token_ids: the model's own end-of-text tokens.
        proposer_names: what a request may ask for.
        total_pages: pages of the target's arena.
        page_size: tokens of one of them.
        device: where it computes.
        loop: where sequences decode that can.
        dtype: type of the target's activations, keys and values.
        load: how busy it is.
    """

    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    proposer_names: tuple[str, ...]
    total_pages: int
    page_size: int
    device: str
    loop: str
    dtype: str
    load: LoadReport


class LoadReport(msgspec.Struct, array_like=True, frozen=True):
    """How busy the engine is, all orders up to number `order` included; the fields are properties of `Engine`."""

    order: int
    num_running: int
    num_waiting: int
    free_pages: int
    spare_pages: int
    spec_gain: float


class Event(msgspec.Struct, array_like=True, frozen=True):
    """A `TokenEvent`, its request named by ticket."""

    ticket: int
    index: int
    token_ids: tuple[int, ...]
    from_draft: tuple[bool, ...]
    logprobs: tuple[Logprob, ...]
    prompt_logprobs: tuple[Logprob | None, ...]
    finished: FinishedOutput | None

    @classmethod
    def of(cls, ticket: int, event: TokenEvent) -> Event:
        """`event` under this ticket."""
        return cls(
            ticket,
            event.index,
            event.token_ids,
            event.from_draft,
            event.logprobs,
            event.prompt_logprobs,
            event.finished,
        )

    def named(self, request_id: str) -> TokenEvent:
        """The event of this request."""
        return TokenEvent(
            request_id=request_id,
            index=self.index,
            token_ids=self.token_ids,
            from_draft=self.from_draft,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            finished=self.finished,
        )


class StepReport(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Events and statistics of a step, or the ends that were ordered without a step: then there are no `stats`."""

    events: tuple[Event, ...]
    stats: StepStats | None
    load: LoadReport


class Beat(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Nothing to say, and alive."""


Order: TypeAlias = Add | Finish | Drop
ToEngine: TypeAlias = Start | Order | Taken
ToFrontEnd: TypeAlias = Progress | Refused | Ready | StepReport | Beat

_encoder = msgspec.msgpack.Encoder()
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_to_front_end: msgspec.msgpack.Decoder[ToFrontEnd] = msgspec.msgpack.Decoder(ToFrontEnd)


def most_bytes(bounds: Bounds) -> int:
    """The largest message between two processes that serve requests of these bounds."""
    return min(_BASE_BYTES + _LOGPROB_BYTES * bounds.max_total_logprobs, (1 << 8 * _LENGTH_BYTES) - 1)


def framed(message: ToEngine | ToFrontEnd, limit: int) -> bytes:
    """A message as it travels; Unsayable beyond `limit` bytes, or with half a surrogate pair in it, or 2**64."""
    try:
        payload = _encoder.encode(message)
    except (msgspec.MsgspecError, ValueError, OverflowError) as error:
        raise Unsayable(f"no message: {error}") from error
    if len(payload) > limit:
        raise Unsayable(f"a message of {len(payload)} bytes; the limit is {limit}")
    return len(payload).to_bytes(_LENGTH_BYTES, "big") + payload


def read_to_engine(payload: bytes) -> ToEngine:
    """Decode a message from the front ends; WireError if it is none."""
    try:
        return _to_engine.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise WireError(f"no message for an engine: {error}") from error


def read_to_front_end(payload: bytes) -> ToFrontEnd:
    """A message from the engine; WireError if it is none."""
    try:
        return _to_front_end.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise WireError(f"no message of an engine: {error}") from error


class Frames:
    """Bytes as they come, cut into payloads: with 0 0 0 2 a b 0 0 comes "ab", and two bytes wait for more."""

    def __init__(self, limit: int) -> None:
        self._limit, self._unread = limit, bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Every payload that is whole now; WireError as soon as one announces itself as larger than allowed."""
        self._unread += data
        start = 0
        try:
            while (payload := self._payload(start)) is not None:
                start += _LENGTH_BYTES + len(payload)
                yield payload
        finally:
            del self._unread[:start]

    def _payload(self, start: int) -> bytes | None:
        body = start + _LENGTH_BYTES
        if len(self._unread) < body:
            return None
        size = int.from_bytes(self._unread[start:body], "big")
        if size > self._limit:
            raise WireError(f"a message of {size} bytes; the limit is {self._limit}")
        return bytes(self._unread[body : body + size]) if len(self._unread) >= body + size else None
