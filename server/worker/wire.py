"""Messages between the front-end process and the engine's process: length, kind, then MessagePack.

Each field is checked when a message is read. Messages contain no code, no class names and no references. So an attacker
who could write to the socket could only request tokens.

Both processes count the orders (messages that add or end requests), so that an output can refer to the executed orders
by their number.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias, get_args

import msgspec

from pilotfish.engine.config import Bounds
from pilotfish.engine.errors import InvalidRequest, ModelError, PilotfishError, Unsupported, Violation
from pilotfish.engine.params import Guided
from pilotfish.engine.request.intake import EngineFacts
from pilotfish.engine.stats import EngineLoad, StepOutput
from pilotfish.engine.types import FinishReason, Request
from pilotfish.server.config import LogFormat
from pilotfish.server.errors import RequestFailed

_LENGTH_BYTES = 4  # big-endian, of the payload that follows: the index of its kind in `_KINDS`, and the message
MOST_ORDER_BYTES = 64 << 20  # limit of a message without log-probabilities: prompts, structures, a step's tokens
_MOST_BYTES = (1 << 8 * _LENGTH_BYTES) - 1
_LOGPROB_BYTES = 64  # generous size of one log-probability and its token


class WireError(PilotfishError):
    """Unexpected: bytes are not a valid message, or exceed the limit. The connection is unusable."""


class EncodeError(PilotfishError):
    """Expected: a request is too large for a message, or has a value that cannot be encoded.

    Only this request is refused.
    """


class _Message(msgspec.Struct, array_like=True, frozen=True):
    """A message that exists only between the two processes."""


# ------------------------------------------------------------------------------------------ from front ends to engine


class Start(_Message, frozen=True):
    """The first message: what to load, and settings of the process."""

    config: str  # an `EngineConfig` as JSON
    log_format: LogFormat  # format of the log
    heartbeat_seconds: float  # maximum time between two messages once the engine is ready and no step runs
    # an engine with this configuration ran before, so this one does not calibrate at load
    is_successor: bool = False
    watches_cache: bool = False  # outputs contain the changes of the prefix cache


class Finish(_Message, frozen=True):
    """End a request, or one of its outputs, before the next step; see `Engine.finish`. An event reports the end.

    Without an event if the request `is_dropped`, because its reader is gone.
    """

    request_id: str
    reason: FinishReason
    index: int | None = None
    keep: int | None = None
    is_dropped: bool = False


class Compile(_Message, frozen=True):
    """Compile a structure in the background, and check that it allows the tokens that a caller has `received`."""

    number: int  # of the `Answer`
    guided: Guided
    received: tuple[tuple[int, ...], ...] = ()  # of each output of a continued request


class LoadAdapter(_Message, frozen=True):
    """Load an adapter from a folder; `fingerprint` is the required one, "" for any."""

    number: int  # of the `Answer`
    name: str
    folder: str
    fingerprint: str = ""


class UnloadAdapter(_Message, frozen=True):
    """Unload an adapter that no request uses."""

    name: str


class CalibrationText(_Message, frozen=True):
    """The calibration text of an idle engine, in tokens, so that it does not need a tokenizer."""

    token_ids: tuple[int, ...]


class Taken(_Message, frozen=True):
    """The front-end process has read one more `StepOutput`, so the engine may send another."""


# ------------------------------------------------------------------------------------------ from engine to front ends


class Progress(_Message, frozen=True):
    """A stage of loading has begun."""

    stage: str


class Refused(_Message, frozen=True):
    """The models cannot be served (a `ModelError`); the process ends."""

    problem: str


class Ready(_Message, frozen=True):
    """The engine is loaded and warm."""

    facts: EngineFacts
    load: EngineLoad  # at the start
    adapters: dict[str, str] = {}  # the fingerprints of the adapters that the configuration names, by name


class Answer(_Message, frozen=True):
    """The answer to the `Compile` or `LoadAdapter` of the same number."""

    number: int
    fingerprint: str = ""  # of the adapter
    violations: tuple[Violation, ...] = ()  # of an `InvalidRequest`
    unsupported: str | None = None  # the message of an `Unsupported`
    refused: str | None = None  # the message of a `ModelError`
    fault: str | None = None  # an internal error; the log has the cause

    @property
    def error(self) -> PilotfishError | None:
        """The error to raise for the caller."""
        if self.violations:
            return InvalidRequest(self.violations)
        found = {Unsupported: self.unsupported, ModelError: self.refused, RequestFailed: self.fault}
        return next((kind(problem) for kind, problem in found.items() if problem is not None), None)


class Heartbeat(_Message, frozen=True):
    """The engine's process is alive and has nothing to report."""


Order: TypeAlias = Request | Finish | LoadAdapter | UnloadAdapter
ToEngine: TypeAlias = Start | Order | Compile | CalibrationText | Taken
ToFrontEnd: TypeAlias = Progress | Refused | Ready | StepOutput | Answer | Heartbeat
Message: TypeAlias = ToEngine | ToFrontEnd

_KINDS = get_args(Message)
_INDICES = {kind: index for index, kind in enumerate(_KINDS)}
_encoder = msgspec.msgpack.Encoder()
_decoders: list[msgspec.msgpack.Decoder[Any]] = [msgspec.msgpack.Decoder(kind) for kind in _KINDS]


def most_bytes(bounds: Bounds) -> int:
    """Return the maximum bytes of an engine's message if all requests are within these bounds."""
    return min(MOST_ORDER_BYTES + _LOGPROB_BYTES * bounds.max_total_logprobs, _MOST_BYTES)


def framed(message: Message, limit: int = _MOST_BYTES) -> bytes | bytearray:
    """Encode a message with its length.

    Raises EncodeError if it exceeds `limit` bytes, or contains half a surrogate pair or an integer of 2**64 or more.
    """
    frame = bytearray()
    try:
        _encoder.encode_into(message, frame, _LENGTH_BYTES + 1)
    except (msgspec.MsgspecError, ValueError, OverflowError) as error:
        raise EncodeError(f"invalid message: {error}") from error
    size = len(frame) - _LENGTH_BYTES
    if size > limit:
        raise EncodeError(f"a message of {size} bytes; the limit is {limit}")
    frame[: _LENGTH_BYTES + 1] = *size.to_bytes(_LENGTH_BYTES, "big"), _INDICES[type(message)]
    return frame


def read(payload: bytes) -> Message:
    """Decode a message. Raises WireError if it is not valid."""
    try:
        message: Message = _decoders[payload[0]].decode(memoryview(payload)[1:])
    except (IndexError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise WireError(f"invalid message: {error}") from error
    return message


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
