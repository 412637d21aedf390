"""The lock on both doors: where tokens are asked for, nothing but health and an empty page is answered without."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import grpc
from starlette.types import ASGIApp, Receive, Scope, Send

from server import playground
from server.boundary import refuse
from server.errors import Unauthenticated
from server.http_errors import http_error
from server.security import Caller, Callers
from server.status import refusal

OPEN_METHODS = "/grpc.health.v1.Health/"
OPEN_PATHS = frozenset({"/health"}) | playground.PATHS


class Guard(grpc.aio.ServerInterceptor):
    """The outermost interceptor: what it does not know it refuses, methods that do not exist too."""

    def __init__(self, callers: Callers) -> None:
        self._callers = callers

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """The method's own handler, or one that refuses."""
        handler = await continuation(handler_call_details)
        if str(handler_call_details.method).startswith(OPEN_METHODS):
            return handler
        try:
            caller_of(self._callers, handler_call_details.invocation_metadata)
        except Unauthenticated as error:
            return _refusing(error)
        return handler


def caller_of(callers: Callers, metadata: Iterable[tuple[str, str | bytes]] | None) -> Caller:
    """Who makes a call; Unauthenticated if nobody who may."""
    given = [value for key, value in metadata or () if key == "authorization"]
    if len(given) > 1:
        raise Unauthenticated("authorization is there more than once")
    return callers.identify(str(given[0]) if given else None)


def _refusing(error: Unauthenticated) -> grpc.RpcMethodHandler[Any, Any]:
    async def refused(_: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await refuse(refusal(error), str(error), context)

    return grpc.unary_unary_rpc_method_handler(refused)


class HttpGuard:
    """The same for HTTP; a route finds its caller in the scope."""

    def __init__(self, app: ASGIApp, callers: Callers) -> None:
        self._app, self._callers = app, callers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let through who may pass."""
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            try:
                scope["caller"] = caller_of(self._callers, _headers(scope))
            except Unauthenticated as error:
                await http_error(error).response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _headers(scope: Scope) -> list[tuple[str, str | bytes]]:
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
