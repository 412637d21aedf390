"""The HTTP server on the event loop, its guards, and the routes for health, metrics and models. Knows no engine."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from ipaddress import ip_address
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.errors import shown
from server.admission.security import Callers
from server.config import LOOPBACK, ServerConfig
from server.driver import Driver
from server.errors import Forbidden, NotFound, Unauthenticated
from server.http import playground
from server.http.errors import error_at
from server.http.limits import HttpProtocol, RequestLimits
from server.http.playground import add_playground
from server.lifecycle import Lifecycle, State
from server.telemetry.exposition import Exposition
from server.version import version

OPEN_PATHS = frozenset({"/health"}) | playground.PATHS


class HostGuard:
    """Middleware for a server on loopback without tokens: it refuses requests that name another host.

    A web page can let its own name lead to 127.0.0.1 (DNS rebinding). The browser then takes this server for the page's
    own site: the page could read every answer. The header Host still has the page's name.
    """

    def __init__(self, app: ASGIApp, host: str) -> None:
        self._app, self._names = app, {"localhost", host}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 403 if the header Host is there and names neither this machine nor the configured address."""
        given = dict(_headers(scope)).get("host") if scope["type"] == "http" else None
        if given is None or self._is_ours(str(given)):
            await self._app(scope, receive, send)
            return
        problem = f"the header Host is {shown(given)}; expected localhost or a loopback address, or set token_file"
        await error_at(scope["path"], Forbidden(problem)).response()(scope, receive, send)

    def _is_ours(self, given: str) -> bool:
        """Compare the name without its port: "[::1]:8000" -> "::1"."""
        name = given.partition("]")[0].removeprefix("[") if given.startswith("[") else given.partition(":")[0]
        try:
            return name.lower() in self._names or ip_address(name).is_loopback
        except ValueError:
            return False


class HttpGuard:
    """Middleware that passes only authenticated requests; it stores the caller in the scope for the routes."""

    def __init__(self, app: ASGIApp, callers: Callers) -> None:
        self._app, self._callers = app, callers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 401 unless the path is open or the token is known."""
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            try:
                scope["caller"] = self._callers.of_metadata(_credentials(scope), (scope.get("client") or (None,))[0])
            except Unauthenticated as error:
                await error_at(scope["path"], error).response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _credentials(scope: Scope) -> list[tuple[str, str | bytes]]:
    """Return the headers; Anthropic's `x-api-key` counts as a bearer token where there is no `authorization`."""
    headers = _headers(scope)
    if any(name == "authorization" for name, _ in headers):
        return headers
    return [("authorization", f"Bearer {value!s}") if name == "x-api-key" else (name, value) for name, value in headers]


def _headers(scope: Scope) -> list[tuple[str, str | bytes]]:
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]


LAST_RESPONSES_SECONDS = 2  # for responses that are not fully read: a stalled reader must not delay the shutdown


def gateway(
    lifecycle: Lifecycle,
    driver: Callable[[], Driver | None],
    exposition: Exposition,
    config: ServerConfig,
    callers: Callers,
) -> FastAPI:
    """Create the application with the routes that do not generate; `driver` returns None until the model is loaded."""
    # Without the pages of documentation, which load scripts of others.
    app, started = FastAPI(title="Pilotfish", version=version(), docs_url=None, redoc_url=None), time.monotonic()
    created = int(time.time())  # of the server: when the model was made is not known
    app.add_middleware(HeadAsGet)
    app.add_middleware(HttpGuard, callers=callers)
    if config.host in LOOPBACK and not callers.are_known:
        app.add_middleware(HostGuard, host=config.host)
    app.add_middleware(  # added last, so it runs first
        RequestLimits,
        max_head=config.max_header_bytes,
        max_body=config.max_message_bytes,
        seconds=config.body_seconds,
    )

    if config.playground:
        add_playground(app)

    @app.get("/health")
    async def health() -> JSONResponse:
        """Return the state, with status 200 while the server accepts requests, else 503."""
        loaded = driver()
        body: dict[str, Any] = {"status": lifecycle.state.value}
        if lifecycle.state in (State.STARTING, State.RECOVERING):
            body["progress"] = lifecycle.progress
        body["uptime_seconds"] = round(time.monotonic() - started, 3)
        if loaded is not None:
            body |= _vitals(loaded)
        return JSONResponse(body, status_code=200 if lifecycle.state is State.READY else 503)

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        """Return all metrics in Prometheus text format, or in OpenMetrics if the Accept header requests it."""
        page, content_type = exposition.page(request.headers.get("accept", ""))
        asyncio.get_running_loop().call_soon(exposition.renew)  # whoever asks in the same turn gets the same page
        return Response(page, media_type=content_type)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """Return the served model and its adapters in the format of OpenAI's list of models."""
        loaded = driver()
        return {"object": "list", "data": [] if loaded is None else _models(loaded, created)}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """Return the served model or one of its adapters; a name may have slashes."""
        loaded = driver()
        cards = {} if loaded is None else {card["id"]: card for card in _models(loaded, created)}
        if name not in cards:
            raise NotFound(f"model is {shown(name)}; this server has {', '.join(map(repr, cards)) or 'none yet'}")
        return cards[name]

    return app


def _models(driver: Driver, created: int) -> list[dict[str, Any]]:
    """Return the model as OpenAI's list has it, and the longest context; then each adapter, which names its model."""
    model = driver.model
    about = {
        "object": "model",
        "created": created,
        "owned_by": "pilotfish",
        "max_model_len": model.engine.max_model_len,
    }
    adapters = ({"id": name, **about, "parent": model.name} for name in driver.adapters)
    return [{"id": model.name, **about}, *adapters]


def _vitals(driver: Driver) -> dict[str, Any]:
    """Return model, settings and load. Figures of speculation are of the last steps; None before the first."""
    model, estimates = driver.model, driver.estimates
    engine = model.engine
    return {
        "model": model.name,
        "draft_model": model.draft_name,
        "device": model.device,
        "speculation": engine.config.speculation.value,
        "num_draft_tokens": engine.config.num_draft_tokens,
        "acceptance_rate": estimates.acceptance_rate,
        "acceptance_length": estimates.acceptance_length,
        "spec_gain": engine.load.spec_gain,
        "running": engine.load.num_running,
        "waiting": engine.load.num_waiting + len(driver.queue),
    }


class HeadAsGet:
    """Middleware that lets the route of GET answer HEAD; uvicorn leaves out the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        await self._app({**scope, "method": "GET"} if scope.get("method") == "HEAD" else scope, receive, send)


class HttpServer(uvicorn.Server):
    """uvicorn on a socket of ours, without its signal handlers: `app` handles signals for both front ends."""

    def __init__(self, app: FastAPI, config: ServerConfig) -> None:
        class Protocol(HttpProtocol):
            head_seconds, stall_seconds = config.body_seconds, config.stall_seconds

        # h11 is selected by name: another parser, if one is installed, would have other limits.
        settings = uvicorn.Config(app, http=Protocol, ws="none", log_config=None, access_log=False, lifespan="off")
        if config.tls_cert is not None:
            settings.ssl_certfile, settings.ssl_keyfile = config.tls_cert, config.tls_key
        if config.tls_client_ca is not None:
            settings.ssl_ca_certs, settings.ssl_cert_reqs = str(config.tls_client_ca), ssl.CERT_REQUIRED
        settings.h11_max_incomplete_event_size = config.max_header_bytes
        settings.timeout_graceful_shutdown = LAST_RESPONSES_SECONDS
        super().__init__(settings)
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        self._socket = socket.create_server((config.host, config.http_port), family=family)
        # Connections inherit this option. uvloop sets it itself; asyncio sets it only if the socket names TCP as its
        # protocol, which this one does not. Without the option the second part of each answer waits 40 ms for the
        # caller's acknowledgement.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def port(self) -> int:
        """The port on which the server listens, also if the configured port is 0."""
        return int(self._socket.getsockname()[1])

    async def run_until_stopped(self) -> None:
        """Answer requests until `stop`."""
        await self.serve(sockets=[self._socket])

    def stop(self) -> None:
        """Let `run_until_stopped` return once open responses are sent."""
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers."""
        yield
