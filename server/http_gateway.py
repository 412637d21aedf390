"""A thin HTTP door on the same event loop: is it healthy, what does it measure, which model. Knows no engine."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from server.config import ServerConfig
from server.driver import Driver
from server.http_limits import HttpProtocol, RequestLimits
from server.lifecycle import Lifecycle, State
from server.version import version

LAST_RESPONSES_SECONDS = 2  # for what is written but not yet taken: a stalled reader must not keep the server up


def gateway(
    lifecycle: Lifecycle, driver: Callable[[], Driver | None], registry: CollectorRegistry, config: ServerConfig
) -> FastAPI:
    """The routes that generate nothing; `driver` gives None until the model is loaded."""
    app = FastAPI(title="Pilotfish", version=version())
    app.add_middleware(
        RequestLimits,
        max_head=config.max_header_bytes,
        max_body=config.max_message_bytes,
        seconds=config.body_seconds,
    )

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


class HttpServer(uvicorn.Server):
    """uvicorn on a socket of ours and without its signal handlers: `app` has its own, for all doors."""

    def __init__(self, app: FastAPI, config: ServerConfig) -> None:
        class Protocol(HttpProtocol):
            head_seconds = config.body_seconds

        # h11 by name: another parser, if it happened to be installed, would have other limits.
        settings = uvicorn.Config(app, http=Protocol, ws="none", log_config=None, access_log=False, lifespan="off")
        settings.h11_max_incomplete_event_size = config.max_header_bytes
        settings.timeout_graceful_shutdown = LAST_RESPONSES_SECONDS
        super().__init__(settings)
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        self._socket = socket.create_server((config.host, config.http_port), family=family)

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
