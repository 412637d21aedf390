"""grpc.health.v1 as the lifecycle has it. Knows no model: a service is served or it is not.

The name `liveness` has a health of its own, for whoever replaces processes: all is well until the engine has failed.
"""

from __future__ import annotations

from collections.abc import Iterable

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from server.lifecycle import State

LIVENESS = "liveness"


class Health:
    """Answers for "" (the whole server) and for each service; NOT_SERVING in every state but READY."""

    def __init__(self, services: Iterable[str]) -> None:
        self.servicer = health.aio.HealthServicer()
        self._names = ("", *services)

    async def follow(self, state: State) -> None:
        """Answer as `state` asks. To be called before the port opens too: the servicer starts as SERVING."""
        answer = health_pb2.HealthCheckResponse
        status = answer.SERVING if state is State.READY else answer.NOT_SERVING
        for name in self._names:
            await self.servicer.set(name, status)
        await self.servicer.set(LIVENESS, answer.NOT_SERVING if state is State.FAILED else answer.SERVING)


def add_health(health: Health, server: grpc.aio.Server) -> None:
    """Serve it."""
    health_pb2_grpc.add_HealthServicer_to_server(health.servicer, server)
