"""The service grpc.health.v1, set from the state of the lifecycle. Knows no model.

The service name `liveness` is for systems that replace failed processes: it is SERVING until the server has FAILED.
The servicer of grpcio-health-checking holds a lock while it writes to a watcher, and a change of state waits for that
lock: one watcher that reads nothing would stop the server's recovery and its shutdown. Here nobody waits for a watcher.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, TypeAlias

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from server.lifecycle import State

LIVENESS = "liveness"

Response = health_pb2.HealthCheckResponse
Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
Status: TypeAlias = int  # grpcio-health-checking has no types


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Health of "" (the whole server) and of each service: SERVING in the state READY, else NOT_SERVING."""

    def __init__(self, services: Iterable[str], state: State) -> None:
        self._names = ("", *services)
        self._statuses = self._of(state)
        self._changed = asyncio.Event()  # of the current statuses; each change has its own

    async def follow(self, state: State) -> None:
        """Set all answers for `state`, and wake the watchers."""
        self._statuses = self._of(state)
        self._changed.set()
        self._changed = asyncio.Event()

    def _of(self, state: State) -> dict[str, Status]:
        status = Response.SERVING if state is State.READY else Response.NOT_SERVING
        liveness = Response.NOT_SERVING if state is State.FAILED else Response.SERVING
        return dict.fromkeys(self._names, status) | {LIVENESS: liveness}

    async def Check(self, request: Any, context: Context) -> Any:  # noqa: N802
        """Return the status of a service; NOT_FOUND for a name that is none."""
        if request.service not in self._statuses:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return Response(status=self._statuses[request.service])

    async def Watch(self, request: Any, context: Context) -> None:  # noqa: N802
        """Write the status of a service, and each later one; a watcher that reads late gets the newest alone."""
        written = None
        while True:
            changed, status = self._changed, self._statuses.get(request.service, Response.SERVICE_UNKNOWN)
            if status != written:
                await context.write(Response(status=status))
                written = status
            await changed.wait()
