"""The gRPC front end: options, port and interceptor. The interceptor authenticates calls and translates errors.

All calls except those of the health service need a token. grpc.aio answers invalid bytes and exceptions with UNKNOWN
and a Python repr, so the interceptor parses messages and converts errors of our services to statuses. After an internal
error the caller receives INTERNAL without details, and the traceback is logged. The fields of a large message are
counted before it is parsed, because two bytes can encode an empty message that takes a hundred bytes in memory
(https://protobuf.dev/programming-guides/encoding).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import unquote

import grpc
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError

from pilotfish.engine.errors import InvalidRequest, PilotfishError
from pilotfish.server.admission.security import Callers
from pilotfish.server.admission.slow_work import MAX_MIDDLE_BYTES, SlowWork
from pilotfish.server.admission.status import MAX_MESSAGE, Refusal, clipped, refusal, trailers
from pilotfish.server.config import ServerConfig
from pilotfish.server.errors import Unauthenticated

STREAMS_PER_CONNECTION = 1024  # besides those that can be queued
KEEPALIVE_SECONDS = 30  # without traffic, after which a client is pinged
PING_TIMEOUT_SECONDS = 10  # for the answer to a ping
MIN_PING_SECONDS = 10  # clients that ping more often are disconnected


def make_server(config: ServerConfig, callers: Callers, slow: SlowWork) -> grpc.aio.Server:
    """Create a server without services that does not listen yet."""
    return grpc.aio.server(interceptors=[Boundary(callers, slow)], options=_options(config))


def listen(server: grpc.aio.Server, config: ServerConfig) -> int:
    """Open the port and return its number. Raises OSError if the port cannot be opened."""
    host = f"[{config.host}]" if ":" in config.host else config.host
    address, credentials = f"{host}:{config.grpc_port}", _credentials(config)
    try:
        if credentials is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise OSError(f"cannot listen on {address}: {error}") from error


def _options(config: ServerConfig) -> list[tuple[str, int]]:
    options = {
        "grpc.so_reuseport": 0,  # otherwise a second server could open the same port without an error
        "grpc.max_receive_message_length": config.max_message_bytes,
        "grpc.max_metadata_size": config.max_header_bytes,
        "grpc.absolute_max_metadata_size": config.max_header_bytes,
        "grpc.max_concurrent_streams": STREAMS_PER_CONNECTION + config.max_queue_requests,
        # If a client's machine disappears, its connection is not closed. Pings detect this and end its requests.
        "grpc.keepalive_time_ms": 1000 * KEEPALIVE_SECONDS,
        "grpc.keepalive_timeout_ms": 1000 * PING_TIMEOUT_SECONDS,
        "grpc.keepalive_permit_without_calls": 1,
        "grpc.http2.max_pings_without_data": 0,
        # The documented option `min_recv_ping_interval...` has no effect.
        "grpc.http2.min_ping_interval_without_data_ms": 1000 * MIN_PING_SECONDS,
    }
    if config.max_connection_seconds is not None:
        # Without a grace period, live streams may finish, and only new calls need a new connection.
        options["grpc.max_connection_age_ms"] = round(1000 * config.max_connection_seconds)
    return list(options.items())


def _credentials(config: ServerConfig) -> grpc.ServerCredentials | None:
    """Return the TLS credentials; None without TLS."""
    if config.tls_cert is None or config.tls_key is None:
        return None
    authority = None if config.tls_client_ca is None else config.tls_client_ca.read_bytes()
    pair = config.tls_key.read_bytes(), config.tls_cert.read_bytes()
    return grpc.ssl_server_credentials([pair], authority, require_client_auth=authority is not None)


logger = logging.getLogger(__name__)

OPEN_METHODS, OUR_METHODS = "/grpc.health.v1.Health/", "/pilotfish."
Parse = Callable[[bytes], Any]


class Boundary(grpc.aio.ServerInterceptor):
    """Refuses unauthenticated calls, including those of unknown methods, and wraps the methods of our services."""

    def __init__(self, callers: Callers, slow: SlowWork) -> None:
        self._callers, self._slow = callers, slow

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Return the method's handler, wrapped if it is one of ours, or a handler that refuses the call."""
        handler, method = await continuation(handler_call_details), str(handler_call_details.method)
        if method.startswith(OPEN_METHODS):
            return handler
        try:
            self._callers.of_metadata(handler_call_details.invocation_metadata)
        except Unauthenticated as error:
            return grpc.unary_unary_rpc_method_handler(_refusing(error))
        if handler is None or not method.startswith(OUR_METHODS):
            return handler
        parse, serialize = handler.request_deserializer, handler.response_serializer
        assert parse is not None, "a method without a request type"
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(_wrap(handler.unary_stream, parse, self._slow), None, serialize)
        assert handler.unary_unary is not None, "our methods take one message"
        return grpc.unary_unary_rpc_method_handler(_wrap(handler.unary_unary, parse, self._slow), None, serialize)


def _refusing(error: Unauthenticated) -> Any:
    async def refused(_: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await refuse(refusal(error), str(error), context)

    return refused


def _wrap(method: Any, parse: Parse, slow: SlowWork) -> Any:
    async def wrapped(data: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            async with slow.turn(len(data)):
                return await method(await slow.run(parsed, parse, data), context)
        except PilotfishError as error:
            await refuse(refusal(error), str(error), context)
        except Exception:
            logger.exception("a method failed")
            await refuse(Refusal(grpc.StatusCode.INTERNAL, "internal"), "internal error", context)

    return wrapped


async def refuse(refused: Refusal, message: str, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    """End a call with a status and its details, truncated to fit into headers."""
    try:
        short = clipped(message, MAX_MESSAGE)
        await context.abort(refused.code, short, trailers(refused, short))
    except grpc.aio.InternalError:
        logger.info("the caller disconnected before it received the error: %s", message)


def parsed(parse: Parse, data: bytes) -> Any:
    """Return `parse(data)`, after the entries of a large message were counted. Raises InvalidRequest."""
    if len(data) > MAX_MIDDLE_BYTES:
        require_few(data, parse.__self__.DESCRIPTOR)  # type: ignore[attr-defined]  # it is a method of the message's class
    try:
        return parse(data)
    except (DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest.of("request", "is not a valid message of this method, or has invalid UTF-8") from error


def host_of(peer: str) -> str | None:
    """Return the IP address of a peer ("ipv4:10.0.0.1:5", "ipv6:%5B::1%5D:5"); None if it has none."""
    kind, _, address = unquote(peer).partition(":")
    return address.rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else None


MAX_ENTRIES = 65_536  # of one field; a packed list of numbers is one entry
MAX_NUMBERS = 1 << 20  # of a packed list
_TEXTS = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
_VARINT, _BYTES = 0, 2  # wire types
_GROUP = (3, 4)  # the start and the end of one
_FIXED = {1: 8, 5: 4}  # bytes of a number, by its wire type


def require_few(data: bytes, descriptor: Descriptor) -> None:
    """Limit the entries of each field to `MAX_ENTRIES`, and of each packed list to `MAX_NUMBERS`, at any depth.

    Invalid bytes pass, because the parser reports them.

    Raises:
        InvalidRequest: names the field. Also raised for groups (wire types 3 and 4), which our messages do not have and
            whose size is not encoded.
    """
    counts: Counter[str] = Counter()
    position, end, message, path = 0, len(data), descriptor, ""
    outer: list[tuple[int, Descriptor, str]] = []  # the enclosing messages, innermost last
    try:
        while position < end or outer:
            if position >= end:
                end, message, path = outer.pop()
                continue
            tag, position = _varint(data, position)
            field = message.fields_by_number.get(tag >> 3)
            name = f"{path}{'unknown' if field is None else field.name}"
            counts[name] += 1
            if counts[name] > MAX_ENTRIES:
                raise InvalidRequest.of(name, f"has more than {MAX_ENTRIES} entries")
            if tag & 7 in _GROUP:
                raise InvalidRequest.of(name, "is encoded as a group, which this API does not use")
            size, position = _size(data, position, tag & 7)
            inner = None if field is None else field.message_type
            if inner is not None and tag & 7 == _BYTES:
                outer.append((end, message, path))
                end, message, path = position + size, inner, f"{name}."
                continue
            if field is not None and size > MAX_NUMBERS and field.type not in _TEXTS:
                _require_few_numbers(name, data[position : position + size])
            position += size
    except (IndexError, KeyError, ValueError):
        return


def _require_few_numbers(name: str, packed: bytes) -> None:
    """Count the varints of a packed list: each ends with a byte below 128."""
    count = len(packed.translate(None, delete=bytes(range(128, 256))))
    if count > MAX_NUMBERS:
        raise InvalidRequest.of(name, f"has {count} entries; the limit is {MAX_NUMBERS}")


def _size(data: bytes, position: int, wire_type: int) -> tuple[int, int]:
    """Return the number of bytes of a value, and their position."""
    if wire_type == _VARINT:
        return 0, _varint(data, position)[1]
    if wire_type == _BYTES:
        return _varint(data, position)
    return _FIXED[wire_type], position


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """Return a number of 7 bits per byte, lowest first, and the position after it."""
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
        shift += 7
        if shift > 63:
            raise ValueError("a varint of more than ten bytes")
