"""Authentication of gRPC calls: without a valid token a client reaches only the health service."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from server.admission.security import Callers
from server.admission.status import refusal
from server.errors import Unauthenticated
from server.grpc.boundary import refuse

OPEN_METHODS = "/grpc.health.v1.Health/"


class Guard(grpc.aio.ServerInterceptor):
    """The outermost interceptor: it refuses unauthenticated calls, also calls of methods that do not exist."""

    def __init__(self, callers: Callers) -> None:
        self._callers = callers

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Return the method's handler, or a handler that refuses the call."""
        handler = await continuation(handler_call_details)
        if str(handler_call_details.method).startswith(OPEN_METHODS):
            return handler
        try:
            self._callers.of_metadata(handler_call_details.invocation_metadata)
        except Unauthenticated as error:
            return _refusing(error)
        return handler


def _refusing(error: Unauthenticated) -> grpc.RpcMethodHandler[Any, Any]:
    async def refused(_: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await refuse(refusal(error), str(error), context)

    return grpc.unary_unary_rpc_method_handler(refused)
