"""A thin HTTP door on the same event loop: is it healthy, what does it measure, which model. Knows no engine."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.driver import Driver
from server.lifecycle import Lifecycle, State
from server.version import version

LAST_RESPONSES_SECONDS = 2  # for what is written but not yet taken: a stalled reader must not keep the server up


def gateway(
    lifecycle: Lifecycle, driver: Callable[[], Driver | None], registry: CollectorRegistry, max_body_bytes: int
) -> FastAPI:
    """The routes that generate nothing; `driver` gives None until the model is loaded."""
    app = FastAPI(title="Pilotfish", version=version())
    app.add_middleware(BodyLimit, max_bytes=max_body_bytes)

    @app.get("/health")
    async def health() -> JSONResponse:
        """200 while requests are taken, else 503."""
        loaded = driver()
        body: dict[str, Any] = {"status": lifecycle.state.value}
        if lifecycle.state is State.STARTING:
            body["progress"] = lifecycle.progress
        if loaded is not None:
            body |= {"model": loaded.model.name, "draft_model": loaded.model.draft_name, "device": loaded.model.device}
        return JSONResponse(body, status_code=200 if lifecycle.state is State.READY else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        """Prometheus text format."""
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The served model, as OpenAI's clients list it."""
        loaded = driver()
        data = [] if loaded is None else [{"id": loaded.model.name, "object": "model", "owned_by": "pilotfish"}]
        return {"object": "list", "data": data}

    return app


class BodyLimit:
    """Refuses a body that is larger than a gRPC message may be, before all of it is in memory."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app, self._max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count what is received on its way to the routes."""
        left = self._max_bytes

        async def counted() -> Message:
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            if left < 0:
                raise HTTPException(413, f"the body has more than {self._max_bytes} bytes")
            return message

        await self._app(scope, counted, send)


class HttpServer(uvicorn.Server):
    """uvicorn on a socket of ours and without its signal handlers: `app` has its own, for all doors."""

    def __init__(self, app: FastAPI, host: str, port: int) -> None:
        config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off")
        config.timeout_graceful_shutdown = LAST_RESPONSES_SECONDS
        super().__init__(config)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family)

    @property
    def port(self) -> int:
        """The port that is listened on; of use where 0 was asked for."""
        return int(self._socket.getsockname()[1])

    async def run_until_stopped(self) -> None:
        """Answer requests until `stop`."""
        await self.serve(sockets=[self._socket])

    def stop(self) -> None:
        """Let `run_until_stopped` return once open responses are out."""
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield
