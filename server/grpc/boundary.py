"""The edge of the network: callers need a token except for the health service, and failed calls end with a status.

grpc.aio answers invalid bytes and exceptions with UNKNOWN and a Python repr. The interceptor here parses the bytes and
translates the errors of our own services' methods. After an internal fault the caller gets INTERNAL without details,
and the log gets the traceback.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import unquote

import grpc
from google.protobuf.message import DecodeError

from engine.errors import InvalidRequest, PilotfishError
from server.admission.security import Callers
from server.admission.slow_work import MAX_MIDDLE_BYTES, SlowWork
from server.admission.status import MAX_MESSAGE, Refusal, clipped, refusal, trailers
from server.errors import Unauthenticated
from server.grpc.fields import require_few

logger = logging.getLogger(__name__)

OPEN_METHODS, OUR_METHODS = "/grpc.health.v1.Health/", "/pilotfish."
Parse = Callable[[bytes], Any]


class Boundary(grpc.aio.ServerInterceptor):
    """Refuses unauthenticated calls, also of methods that do not exist, and wraps our own services' methods."""

    def __init__(self, callers: Callers, slow: SlowWork) -> None:
        self._callers, self._slow = callers, slow

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Return the method's handler, wrapped if the method is ours; or a handler that refuses the call."""
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
    """End a call with a status and its details, cut to a size that fits into headers."""
    try:
        said = clipped(message, MAX_MESSAGE)
        await context.abort(refused.code, said, trailers(refused, said))
    except grpc.aio.InternalError:
        logger.info("the caller was gone before it could be told: %s", message)


def parsed(parse: Parse, data: bytes) -> Any:
    """Return `parse(data)`; the entries of a large message are counted before. Raises InvalidRequest."""
    if len(data) > MAX_MIDDLE_BYTES:
        require_few(data, parse.__self__.DESCRIPTOR)  # type: ignore[attr-defined]  # it is a method of the message's class
    try:
        return parse(data)
    except (DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest.of("request", "is no message of this method, or has text that is no UTF-8") from error


def host_of(peer: str) -> str | None:
    """Return the address in gRPC's name for a peer, "ipv4:10.0.0.1:5" or "ipv6:%5B::1%5D:5"; None if it has none."""
    kind, _, address = unquote(peer).partition(":")
    return address.rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else None
