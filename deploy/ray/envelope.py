"""The value that a replica returns to the edge: a message, or a status with its details. Uses no Ray and no engine.

Ray transports only the code and text of an error, or a stack trace. So errors are sent as bytes like answers, and the
first byte distinguishes them.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import grpc
from google.protobuf.message import Message
from google.rpc import status_pb2

from pilotfish.engine.errors import PilotfishError
from pilotfish.server.admission.status import MAX_MESSAGE, Refusal, clipped, refusal, trailers

MESSAGE, REFUSED = b"\0", b"\1"
_RETRY = struct.Struct(">i")  # milliseconds, or -1
_CODES = {code.value[0]: code for code in grpc.StatusCode}
INTERNAL = Refusal(grpc.StatusCode.INTERNAL, "internal")


@dataclass(frozen=True, slots=True)
class Envelope:
    """Bytes that Ray accepts as a protobuf message, because Ray calls only `SerializeToString`."""

    data: bytes

    def SerializeToString(self) -> bytes:  # noqa: N802  # protobuf's name
        return self.data

    @classmethod
    def of(cls, message: Message) -> Envelope:
        """Wrap an answer."""
        return cls(MESSAGE + message.SerializeToString())

    @classmethod
    def refused(cls, error: PilotfishError) -> Envelope:
        """Wrap an error, with all details that a caller may see."""
        return cls._status(refusal(error), str(error))

    @classmethod
    def failed(cls) -> Envelope:
        """Wrap an internal error, whose details are hidden from the caller."""
        return cls._status(INTERNAL, "internal error")

    @classmethod
    def _status(cls, refused: Refusal, message: str) -> Envelope:
        (_, status), *_ = trailers(refused, clipped(message, MAX_MESSAGE))
        assert isinstance(status, bytes), "the status comes first"
        retry = -1 if refused.retry_seconds is None else round(1000 * refused.retry_seconds)
        return cls(REFUSED + _RETRY.pack(retry) + status)


@dataclass(frozen=True, slots=True)
class Status:
    """An error that was received in an envelope."""

    code: grpc.StatusCode
    message: str
    trailers: tuple[tuple[str, str | bytes], ...]


def opened(data: bytes) -> bytes | Status:
    """Return the content of an envelope: a message's bytes, or a status."""
    kind, rest = data[:1], data[1:]
    if kind == MESSAGE:
        return rest
    assert kind == REFUSED, "not one of our envelopes"
    (retry,) = _RETRY.unpack_from(rest)
    encoded = rest[_RETRY.size :]
    status = status_pb2.Status.FromString(encoded)
    pairs: list[tuple[str, str | bytes]] = [("grpc-status-details-bin", encoded)]
    if retry >= 0:
        pairs.append(("grpc-retry-pushback-ms", str(retry)))
    return Status(_CODES[status.code], status.message, tuple(pairs))
