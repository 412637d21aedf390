"""What a replica hands to the edge: a message, or a status with its details. Knows neither Ray nor an engine.

Ray carries bytes, and of an error only its code and text, or a stack trace. So errors travel as answers do, and the
first byte says which it is.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import grpc
from google.protobuf.message import Message
from google.rpc import status_pb2

from engine.errors import PilotfishError
from server.admission.status import MAX_MESSAGE, Refusal, clipped, refusal, trailers

MESSAGE, REFUSED = b"\0", b"\1"
_RETRY = struct.Struct(">i")  # milliseconds, or -1
_CODES = {code.value[0]: code for code in grpc.StatusCode}
INTERNAL = Refusal(grpc.StatusCode.INTERNAL, "internal")


@dataclass(frozen=True, slots=True)
class Envelope:
    """Bytes that Ray takes for a message of protobuf: it asks for no more than this method."""

    data: bytes

    def SerializeToString(self) -> bytes:  # noqa: N802  # protobuf's name
        """The bytes."""
        return self.data

    @classmethod
    def of(cls, message: Message) -> Envelope:
        """An answer."""
        return cls(MESSAGE + message.SerializeToString())

    @classmethod
    def refused(cls, error: PilotfishError) -> Envelope:
        """An error, with everything that a caller may hear of it."""
        return cls._status(refusal(error), str(error))

    @classmethod
    def failed(cls) -> Envelope:
        """A fault of ours, of which a caller hears no more than that."""
        return cls._status(INTERNAL, "internal error")

    @classmethod
    def _status(cls, refused: Refusal, message: str) -> Envelope:
        (_, status), *_ = trailers(refused, clipped(message, MAX_MESSAGE))
        assert isinstance(status, bytes), "the status comes first"
        retry = -1 if refused.retry_seconds is None else round(1000 * refused.retry_seconds)
        return cls(REFUSED + _RETRY.pack(retry) + status)


@dataclass(frozen=True, slots=True)
class Status:
    """An error that came in an envelope."""

    code: grpc.StatusCode
    message: str
    trailers: tuple[tuple[str, str | bytes], ...]


def opened(data: bytes) -> bytes | Status:
    """What was put into an envelope: a message's bytes, or a status."""
    kind, rest = data[:1], data[1:]
    if kind == MESSAGE:
        return rest
    assert kind == REFUSED, "not one of our envelopes"
    (retry,) = _RETRY.unpack_from(rest)
    told = rest[_RETRY.size :]
    status = status_pb2.Status.FromString(told)
    pairs: list[tuple[str, str | bytes]] = [("grpc-status-details-bin", told)]
    if retry >= 0:
        pairs.append(("grpc-retry-pushback-ms", str(retry)))
    return Status(_CODES[status.code], status.message, tuple(pairs))
