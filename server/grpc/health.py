"""The service grpc.health.v1, set from the state of the lifecycle. Knows no model.

The service name `liveness` is for systems that replace failed processes: it is SERVING until the server has FAILED.
"""

from __future__ import annotations

from collections.abc import Iterable

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from server.lifecycle import State

LIVENESS = "liveness"


class Health:
    """Health of "" (the whole server) and of each service: SERVING in the state READY, else NOT_SERVING."""

    def __init__(self, services: Iterable[str]) -> None:
        self.servicer = health.aio.HealthServicer()
        self._names = ("", *services)

    async def follow(self, state: State) -> None:
        """Set all answers for `state`. Call it also before the port opens, because the servicer starts as SERVING."""
        answer = health_pb2.HealthCheckResponse
        status = answer.SERVING if state is State.READY else answer.NOT_SERVING
        for name in self._names:
            await self.servicer.set(name, status)
        await self.servicer.set(LIVENESS, answer.NOT_SERVING if state is State.FAILED else answer.SERVING)


def add_health(health: Health, server: grpc.aio.Server) -> None:
    """Add the health service to `server`."""
    health_pb2_grpc.add_HealthServicer_to_server(health.servicer, server)
