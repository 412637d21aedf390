"""Messages between the front-end process and the engine's process: length, then MessagePack. Knows no sockets.

Every message is one of the structs below, and each field is checked when the message is read. Messages contain no code,
no class names and no references. So an attacker who could write to the socket could only request tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias, TypeVar

import msgspec

from engine.config import Bounds
from engine.errors import PilotfishError, Violation
from engine.facts import EngineFacts
from engine.kv.pages import CacheChange
from engine.params import Guided
from engine.stats import EngineLoad, StepStats
from engine.types import FinishReason, Request, TokenEvent
from server.config import LogFormat

T = TypeVar("T")

_LENGTH_BYTES = 4  # big-endian, of the payload that follows
MOST_ORDER_BYTES = 64 << 20  # limit of a message without log-probabilities: prompts, structures, a step's tokens
_MOST_BYTES = (1 << 8 * _LENGTH_BYTES) - 1
_LOGPROB_BYTES = 64  # generous size of one log-probability and its token


class WireError(PilotfishError):
    """Unexpected: bytes are not a valid message, or exceed the limit. The connection cannot be used any more."""


class Unsayable(PilotfishError):
    """Expected: a request does not fit into a message: it is too large, or a value cannot be encoded.

    Only this request is refused.
    """


# ------------------------------------------------------------------------------------------ from front ends to engine


class Start(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The first message: what to load, and settings of the process."""

    config: str  # an `EngineConfig` as JSON
    log_format: LogFormat  # format of the log
    beat_seconds: float  # most seconds between two messages from the engine once it is ready and no step runs
    # an engine with this configuration ran here before, so this one calibrates nothing at load
    is_successor: bool = False
    watches_cache: bool = False  # the reports contain the changes of the prefix cache


class Add(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Add a checked request. Its id is never used again: where a caller uses one twice, messages differ all the same.

    `order` counts all orders, so that a report can name the last order that it includes.
    """

    order: int
    request: Request


class Finish(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """End a request, or one of its outputs, before the next step; see `Engine.finish`. An event reports the end.

    Not where the request `is_dropped`: its reader is gone, and its events are not needed.
    """

    order: int
    request_id: str
    reason: FinishReason
    index: int | None = None
    keep: int | None = None
    is_dropped: bool = False


class Compile(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Compile a structure beside the steps, and check that it allows the tokens that a caller has `received`."""

    order: int
    guided: Guided
    received: tuple[tuple[int, ...], ...] = ()  # of each output of a continued request


class LoadAdapter(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Load an adapter from a folder; `fingerprint` is the one that it has to have, "" for any. The answer follows."""

    order: int
    name: str
    folder: str
    fingerprint: str = ""


class UnloadAdapter(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Forget an adapter, which no request uses any more."""

    order: int
    name: str


class CalibrationText(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The text with which an idle engine calibrates, in tokens: else it would read a tokenizer of its own for it."""

    token_ids: tuple[int, ...]


class Taken(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The front-end process has read one more `StepReport`, so the engine may send another."""


# ------------------------------------------------------------------------------------------ from engine to front ends


class Progress(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A stage of loading has begun."""

    stage: str


class Refused(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The models cannot be served (a `ModelError`); the process ends."""

    problem: str


class Ready(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The engine is loaded and warm."""

    facts: EngineFacts
    load: EngineLoad  # at the start
    adapters: dict[str, str] = {}  # the fingerprints of the adapters that the configuration names, by name


class StepReport(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Events and statistics of a step; or events that need no step, such as ordered ends: then `stats` is None.

    `load` is that after all orders up to number `order`.
    """

    events: tuple[TokenEvent, ...]
    stats: StepStats | None
    order: int
    load: EngineLoad
    cache_changes: tuple[CacheChange, ...] = ()


class Compiled(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The answer to `Compile`: what is wrong with the structure or with the tokens, if anything is."""

    order: int
    violations: tuple[Violation, ...] = ()  # of an `InvalidRequest`
    unsupported: str | None = None  # the message of an `Unsupported`
    is_fault: bool = False  # the compilation failed by a fault of ours, which the log has


class AdapterAnswer(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The answer to `LoadAdapter`: the adapter's fingerprint, or why it cannot be served (a `ModelError`)."""

    order: int
    fingerprint: str = ""
    problem: str | None = None


class Beat(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The engine's process is alive and has nothing to report."""


ToEngine: TypeAlias = Start | Add | Finish | Compile | LoadAdapter | UnloadAdapter | CalibrationText | Taken
Answer: TypeAlias = Compiled | AdapterAnswer
ToFrontEnd: TypeAlias = Progress | Refused | Ready | StepReport | Answer | Beat

_encoder = msgspec.msgpack.Encoder()
TO_ENGINE: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
TO_FRONT_END: msgspec.msgpack.Decoder[ToFrontEnd] = msgspec.msgpack.Decoder(ToFrontEnd)


def most_bytes(bounds: Bounds) -> int:
    """Return the most bytes of a message of the engine if all requests are within these bounds."""
    return min(MOST_ORDER_BYTES + _LOGPROB_BYTES * bounds.max_total_logprobs, _MOST_BYTES)


def framed(message: ToEngine | ToFrontEnd, limit: int = _MOST_BYTES) -> bytes:
    """Encode a message with its length.

    Raises Unsayable if it exceeds `limit` bytes, or contains half a surrogate pair or an integer of 2**64 or more.
    """
    try:
        payload = _encoder.encode(message)
    except (msgspec.MsgspecError, ValueError, OverflowError) as error:
        raise Unsayable(f"no message: {error}") from error
    if len(payload) > limit:
        raise Unsayable(f"a message of {len(payload)} bytes; the limit is {limit}")
    return len(payload).to_bytes(_LENGTH_BYTES, "big") + payload


def read(payload: bytes, decoder: msgspec.msgpack.Decoder[T]) -> T:
    """Decode a message. Raises WireError if it is not valid."""
    try:
        return decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise WireError(f"no valid message: {error}") from error


class Frames:
    """Splits received bytes into payloads: 0 0 0 2 a b 0 0 gives "ab", and the last two bytes wait for more."""

    def __init__(self, limit: int) -> None:
        self._limit, self._unread = limit, bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Add bytes and yield every complete payload. Raises WireError if a length exceeds the limit."""
        self._unread += data
        start = 0
        try:
            while len(self._unread) >= (body := start + _LENGTH_BYTES):
                size = int.from_bytes(self._unread[start:body], "big")
                if size > self._limit:
                    raise WireError(f"a message of {size} bytes; the limit is {self._limit}")
                if len(self._unread) < body + size:
                    return
                start = body + size
                yield bytes(self._unread[body:start])
        finally:
            del self._unread[:start]
