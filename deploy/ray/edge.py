"""Our methods on Ray's gRPC proxy: callers get the same statuses as from our own server, and never a stack trace.

Ray calls `add_inference` and `add_control` in each proxy process with the gRPC server of the proxy, which sends every
call to a replica. This module wraps each method and adds what `server/grpc/server.py` does in our own server. It
rejects bytes that are not a valid message, and parses large messages one by one beside the event loop. It ends the call
with the status from an envelope. It passes the deadline on as metadata. It translates Ray's own errors (a replica was
lost, all replicas are busy) to the statuses that our server would return.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import grpc

from deploy.ray.envelope import Status, opened
from pilotfish.engine.errors import InvalidRequest, PilotfishError
from pilotfish.server.admission.slow_work import SlowWork
from pilotfish.server.admission.status import refusal
from pilotfish.server.errors import QueueFull, Unavailable
from pilotfish.server.grpc.server import parsed, refuse
from pilotfish.v1 import control_pb2_grpc, generation_pb2_grpc

REMAINING = "pilotfish-remaining-seconds"  # metadata for the replica; a value that the caller sent is removed
RETRY_SECONDS = 1.0

Context = grpc.aio.ServicerContext[Any, Any]
Parse = Callable[[bytes], Any]


def add_inference(servicer: Any, server: Any) -> None:
    """Register InferenceService; listed in `grpc_servicer_functions`."""
    generation_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, _RayServer(server))  # type: ignore[arg-type]


def add_control(servicer: Any, server: Any) -> None:
    """Register ControlService; listed in `grpc_servicer_functions`."""
    control_pb2_grpc.add_ControlServiceServicer_to_server(servicer, _RayServer(server))  # type: ignore[arg-type]


class _RayServer:
    """Ray's gRPC server with the interface that the generated code expects."""

    def __init__(self, server: Any) -> None:
        self._server, self._slow = server, SlowWork()

    def add_generic_rpc_handlers(self, handlers: tuple[grpc.GenericRpcHandler, ...]) -> None:
        self._server.add_generic_rpc_handlers(tuple(_Edge(handler, self._slow) for handler in handlers))

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Do nothing: registered methods would bypass the generic handlers and their wrapper."""


class _Edge(grpc.GenericRpcHandler):
    """A service whose methods Ray has replaced with its own; this class wraps each of them."""

    def __init__(self, inner: Any, slow: SlowWork) -> None:
        self._inner, self._slow = inner, slow

    @property
    def _method_handlers(self) -> Mapping[str, Any]:  # Ray reads and replaces them under this name
        return self._inner._method_handlers  # type: ignore[no-any-return]  # noqa: SLF001

    @_method_handlers.setter
    def _method_handlers(self, handlers: Mapping[str, Any]) -> None:
        self._inner._method_handlers = handlers  # noqa: SLF001

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """Return the wrapped handler of the method."""
        handler = self._inner.service(handler_call_details)
        if handler is None:
            return None
        parse = handler.request_deserializer
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(_stream(handler.unary_stream, parse, self._slow))
        return grpc.unary_unary_rpc_method_handler(_unary(handler.unary_unary, parse, self._slow))


def _stream(method: Any, parse: Parse, slow: SlowWork) -> Any:
    async def wrapped(data: bytes, context: Context) -> None:
        call = _Call(context)
        request = await _parsed(parse, data, context, slow)
        async for envelope in method(request, call):
            await context.write(await _content(envelope, context))
        await call.end()

    return wrapped


def _unary(method: Any, parse: Parse, slow: SlowWork) -> Any:
    async def wrapped(data: bytes, context: Context) -> bytes:
        call = _Call(context)
        envelope = await method(await _parsed(parse, data, context, slow), call)
        await call.end()
        return await _content(envelope, context)

    return wrapped


class _Call:
    """A call's context for Ray's methods. It adds metadata, and it keeps the status until `end` has checked it."""

    def __init__(self, context: Context) -> None:
        self._context, self._code, self._details = context, grpc.StatusCode.OK, ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def invocation_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        """Return the caller's metadata, and the seconds that remain until the deadline."""
        given = tuple((key, value) for key, value in self._context.invocation_metadata() or () if key != REMAINING)
        remaining: Any = self._context.time_remaining()
        return given if remaining is None else (*given, (REMAINING, repr(float(remaining))))

    def code(self) -> Any:
        """Return None until a status is set."""
        return None if self._code is grpc.StatusCode.OK else self._code

    def details(self) -> str:
        return self._details

    def set_code(self, code: grpc.StatusCode) -> None:
        """Store the status that Ray reports."""
        self._code = code

    def set_details(self, details: str) -> None:
        """Store the text of the status, which may be a stack trace."""
        self._details = details

    async def end(self) -> None:
        """End the call with the status that Ray reported, unless that is OK."""
        error = _ours(self._code)
        if error is not None:
            await refuse(refusal(error), str(error), self._context)
        elif self._code is not grpc.StatusCode.OK:
            await self._context.abort(self._code, self._details)


def _ours(code: grpc.StatusCode) -> PilotfishError | None:
    """Translate a status of Ray's to an error of ours; None keeps the status. Our errors come in envelopes."""
    match code:
        case grpc.StatusCode.OK | grpc.StatusCode.CANCELLED | grpc.StatusCode.DEADLINE_EXCEEDED:
            return None
        case grpc.StatusCode.NOT_FOUND:  # no application of that name: Ray's text lists the existing ones
            return None
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            problem = "all replicas are busy and the proxy's queue is full"
            return QueueFull(problem, bound="requests", retry_seconds=RETRY_SECONDS)
    return Unavailable("REPLICA_LOST", "the replica was lost; the request may be sent again")


async def _parsed(parse: Parse, data: bytes, context: Context, slow: SlowWork) -> Any:
    try:
        async with slow.turn(len(data)):
            return await slow.run(parsed, parse, data)
    except InvalidRequest as error:
        await refuse(refusal(error), str(error), context)


async def _content(envelope: bytes, context: Context) -> bytes:
    """Return a message's bytes; a status ends the call here."""
    content = opened(envelope)
    if not isinstance(content, Status):
        return content
    await context.abort(content.code, content.message, content.trailers)
    raise AssertionError("abort has raised")
