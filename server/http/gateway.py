"""The HTTP server: guards, limits, the playground, and routes for health, metrics and models."""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import socket
import ssl
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from pilotfish.engine.errors import PilotfishError, shown
from pilotfish.server import version
from pilotfish.server.admission.security import Callers
from pilotfish.server.config import LOOPBACK, ServerConfig
from pilotfish.server.driver import Driver
from pilotfish.server.errors import Forbidden, NotFound, Unauthenticated
from pilotfish.server.http.errors import REQUEST_ID, HttpError, http_error, id_headers
from pilotfish.server.lifecycle import Lifecycle, State
from pilotfish.server.telemetry.metrics import Exposition

PAGE = Path(__file__).resolve().parent / "playground"
# Files of the page at `/`, which calls the server like any other client. They contain no secrets, so they need no
# token; the page's calls do (docs/adr/0027-a-page-without-a-build-step.md).
_MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
PAGE_FILES = {
    "/" if file.name == "index.html" else f"/{file.name}": (file, _MEDIA_TYPES[file.suffix])
    for file in sorted(PAGE.iterdir())
    if file.suffix in _MEDIA_TYPES
}
# No content from other hosts, no inline scripts, no frames, so that text from a model cannot run as code.
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_REQUEST_ID = re.compile(r"[!-.0-~]{1,128}")
_UNTYPED = ("", "application/x-www-form-urlencoded")  # types of bodies whose sender has chosen none, as `curl -d`
OPEN_PATHS = frozenset({"/health", *PAGE_FILES})


class Guard:
    """Middleware around all routes. It refuses a request, or passes it on with its caller.

    - A head or body that is too large or arrives too slowly is refused before all of it is in memory. The limits in
      bytes are those of gRPC messages and metadata.
    - A server on loopback without tokens refuses requests for another host. A web page can resolve its own name to
    127.0.0.1 (DNS rebinding); the browser then treats this server as the page's own site, and the page could read every
    answer. The header Host still has the page's name.
    - Without a known token only open paths are served.
    - A body must be JSON by its type. curl's default type, or none, counts as JSON, but not from a web page (header
    Origin): a page can send such bodies to other sites without their consent.
    - Each request gets an id: that of the header X-Request-Id, or a new one.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig, callers: Callers) -> None:
        self._app, self._config, self._callers = app, config, callers
        self._names = {"localhost", config.host} if config.host in LOOPBACK and not callers.are_known else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse, or pass on without cookies, which FastAPI parses in quadratic time.

        HEAD uses the route of GET; uvicorn omits the body.
        """
        headers = Headers(scope=scope)
        scope[REQUEST_ID] = secrets.token_hex(12)
        refused = self._refusal(scope, headers)
        if refused is not None:
            await http_error(refused).response(scope)(scope, receive, send)
            return
        kept = [(name, value) for name, value in scope["headers"] if name != b"cookie"]
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        counted = _Counted(receive, self._config.max_message_bytes, self._config.body_seconds)
        await self._app({**scope, "headers": kept, "method": method}, counted, send)

    def _refusal(self, scope: Scope, headers: Headers) -> HttpError | PilotfishError | None:
        """Return the error of a refused request; else store its caller and id in the scope."""
        head = sum(len(name) + len(value) for name, value in scope["headers"]) + len(scope.get("raw_path", b""))
        if head > self._config.max_header_bytes:
            problem = f"the headers have {head} bytes; the limit is {self._config.max_header_bytes}"
            return HttpError(431, "http", problem)
        given = headers.get("host")
        if self._names is not None and given is not None and not self._is_ours(given, self._names):
            problem = f"the header Host is {shown(given)}; expected localhost or a loopback address, or set token_file"
            return Forbidden(problem)
        if scope["path"] not in OPEN_PATHS:
            try:
                scope["caller"] = self._callers.of_metadata(_credentials(headers), (scope.get("client") or (None,))[0])
            except Unauthenticated as error:
                return error
        request_id = headers.get("x-request-id", scope[REQUEST_ID])
        if not _REQUEST_ID.fullmatch(request_id):
            expected = "expected 1 to 128 visible ASCII characters without /"
            return HttpError(400, "invalid", f"the header X-Request-Id is {shown(request_id)}; {expected}")
        scope[REQUEST_ID] = request_id
        return _type_problem(headers) if scope["method"] == "POST" else None

    @staticmethod
    def _is_ours(given: str, names: set[str]) -> bool:
        """Compare the name without its port: "[::1]:8000" -> "::1"."""
        name = given.partition("]")[0].removeprefix("[") if given.startswith("[") else given.partition(":")[0]
        try:
            return name.lower() in names or ip_address(name).is_loopback
        except ValueError:
            return False


def _type_problem(headers: Headers) -> HttpError | None:
    """Return the error of a body that is not JSON by its header Content-Type; None if it may be JSON."""
    given = headers.get("content-type", "")
    kind = given.partition(";")[0].strip().lower()
    if kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json")):
        return None
    found = f"is {shown(given)}" if given else "is missing"
    if kind in _UNTYPED:
        if "origin" not in headers:
            return None
        found += ", and a web page sent it (header Origin)"
    return HttpError(415, "http", f"the header Content-Type {found}; expected application/json")


def _credentials(headers: Headers) -> Iterable[tuple[str, str]]:
    """Return the headers; without `authorization`, Anthropic's `x-api-key` counts as a bearer token."""
    if "authorization" in headers:
        return headers.items()
    return [("authorization", f"Bearer {value}") for value in headers.getlist("x-api-key")]


class IdentifiedRoute(APIRoute):
    """A route whose responses have the id of their request."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def identified(request: Request) -> Response:
            response = await handle(request)
            response.headers.update(id_headers(request.scope))
            return response

        return identified


LAST_RESPONSES_SECONDS = 2  # for unread responses: a stalled client must not delay the shutdown


def gateway(
    lifecycle: Lifecycle,
    driver: Callable[[], Driver | None],
    exposition: Exposition,
    config: ServerConfig,
    callers: Callers,
) -> FastAPI:
    """Create the application with the routes that do not generate; `driver` returns None until the model is loaded."""
    # Without FastAPI's documentation pages, which load third-party scripts.
    app, started = FastAPI(title="Pilotfish", version=version(), docs_url=None, redoc_url=None), time.monotonic()
    created = int(time.time())  # of the server: the model's creation time is unknown
    app.add_middleware(Guard, config=config, callers=callers)
    app.router.route_class = IdentifiedRoute
    for path, (file, media_type) in PAGE_FILES.items() if config.playground else ():
        page = Response(file.read_bytes(), headers=PAGE_HEADERS, media_type=media_type)
        app.router.routes.append(Route(path, page, methods=["GET"]))

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

    @app.get("/version")
    async def its_version() -> dict[str, str]:
        """Return the version of the server."""
        return {"version": version()}

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        """Return all metrics in Prometheus text format, or in OpenMetrics if the Accept header requests it."""
        page, content_type = exposition.page(request.headers.get("accept", ""))
        return Response(page, media_type=content_type)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """Return the served model and its adapters in the format of OpenAI's list of models."""
        loaded = driver()
        return {"object": "list", "data": [] if loaded is None else _models(loaded, created)}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """Return the served model or one of its adapters; a name may contain slashes."""
        loaded = driver()
        cards = {} if loaded is None else {card["id"]: card for card in _models(loaded, created)}
        if name not in cards:
            raise NotFound(f"model is {shown(name)}; this server has {', '.join(map(repr, cards)) or 'none yet'}")
        return cards[name]

    return app


def _models(driver: Driver, created: int) -> list[dict[str, Any]]:
    """Return the model by each of its names, in OpenAI's format with additions, and its adapters, with their parent."""
    model = driver.model
    about = {
        "object": "model",
        "created": created,
        "owned_by": "pilotfish",
        "max_model_len": model.engine.facts.limits.max_model_len,
        "default_sampling_params": dict(model.defaults.values),
    }
    adapters = ({"id": name, **about, "parent": model.name} for name in driver.adapters)
    return [*({"id": name, **about} for name in model.names), *adapters]


def _vitals(driver: Driver) -> dict[str, Any]:
    """Return model, settings and load. Speculation statistics cover recent steps; None before the first."""
    model, estimates = driver.model, driver.estimates
    engine = model.engine
    return {
        "model": model.name,
        "draft_model": model.draft_name,
        "device": model.device,
        "has_chat_template": model.chat is not None and model.codec is not None,
        "speculation": engine.config.speculation.value,
        "num_draft_tokens": engine.config.num_draft_tokens,
        "acceptance_rate": estimates.acceptance_rate,
        "acceptance_length": estimates.acceptance_length,
        "spec_gain": round(engine.load.spec_gain, 4),
        "running": engine.load.num_running,
        "waiting": engine.load.num_waiting + len(driver.queue),
    }


class HttpServer(uvicorn.Server):
    """uvicorn on our own socket, without its signal handlers: `app` handles signals for both front ends."""

    def __init__(self, app: FastAPI, config: ServerConfig) -> None:
        class Protocol(HttpProtocol):
            head_seconds, stall_seconds = config.body_seconds, config.stall_seconds

        # h11 is selected explicitly: another installed parser would have other limits.
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
        return int(self._socket.getsockname()[1])

    async def run_until_stopped(self) -> None:
        await self.serve(sockets=[self._socket])

    def stop(self) -> None:
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


ANSWER_SECONDS = 1.0  # for a request's body to arrive after its answer; then the connection is closed
# Chunks of a body beyond one per this many bytes: each chunk costs as much event-loop time as a few kilobytes.
MAX_CHUNKS, MIN_CHUNK = 1024, 512
STALLED = "reader_stalled"  # set in a request's scope when its connection is aborted because the client stalled


class _Counted:
    """A `receive` that limits the body's size and arrival time; after the body there is no deadline."""

    def __init__(self, receive: Receive, max_bytes: int, seconds: float) -> None:
        self._receive, self._max_bytes, self._seconds = receive, max_bytes, seconds
        self._left = max_bytes
        self._deadline: float | None = asyncio.get_running_loop().time() + seconds

    async def __call__(self) -> Message:
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            raise HTTPException(408, f"the body took more than {self._seconds:g} seconds to arrive") from None
        self._left -= len(message.get("body", b""))
        if self._left < 0:
            raise HTTPException(413, f"the body has more than {self._max_bytes} bytes")
        if not message.get("more_body", False):
            self._deadline = None
        return message


class _Connection(h11.Connection):
    """h11's connection; it rejects a body of too many small chunks."""

    problem = ""  # the error of a refused request
    _num_chunks = _num_bytes = 0

    def next_event(self) -> type[h11.NEED_DATA | h11.PAUSED] | h11.Event:
        """Return the next h11 event, and count it."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._num_chunks = self._num_bytes = 0
        elif isinstance(event, h11.Data):
            self._num_chunks, self._num_bytes = self._num_chunks + event.chunk_start, self._num_bytes + len(event.data)
            if self._num_chunks > MAX_CHUNKS + self._num_bytes // MIN_CHUNK:
                self.problem = f"the body has {self._num_chunks} chunks for {self._num_bytes} bytes"
                raise h11.RemoteProtocolError(self.problem)
        return event


class HttpProtocol(H11Protocol):
    """uvicorn's protocol with time limits for a request's head and body to arrive and for answers to be read.

    uvicorn itself has none. `Guard` answers a late body with 408; this closes the connection a little later, also if
    the route does not read the body.

    A closing connection waits until its data is read. If its client does not read, it is aborted a little after
    `stall_seconds`, so that a stream that waits for its client reports the stall first. A stream that has nothing to
    write at that time finds `STALLED` in its scope.
    """

    head_seconds = stall_seconds = 30.0

    def __init__(self, config: uvicorn.Config, *args: Any, **named: Any) -> None:
        super().__init__(config, *args, **named)
        assert config.h11_max_incomplete_event_size is not None, "HttpServer sets it"
        self.conn: _Connection = _Connection(h11.SERVER, config.h11_max_incomplete_event_size)
        self._unsent: asyncio.TimerHandle | None = None  # set while the client must send
        self._awaited: float | None = None  # duration of this timer
        self._unread: asyncio.TimerHandle | None = None  # set while the client must read
        self._is_lost = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """Expect the next request. If the body has not arrived yet, it has `ANSWER_SECONDS` left."""
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        """Restart the client's timer, if it must read the rest before the connection closes."""
        super().resume_writing()
        self._unread = self._timer(self._unread, None, self._abort)
        self._watch()

    def shutdown(self) -> None:
        super().shutdown()
        self._watch()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._watch()

    def send_400_response(self, msg: str) -> None:
        """Send the error, unless the request is already answered; then close the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(self.conn.problem or msg)
        self._close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True
        super().connection_lost(exc)
        self._watch()

    def _watch(self) -> None:
        """Set the timers for what the client must send, and for what it must read before the connection closes.

        When closing, the size of the transport's buffer is not sufficient: with TLS there is another buffer below.
        """
        seconds = None if self._is_lost else self._seconds()
        if seconds != self._awaited:
            self._awaited, self._unsent = seconds, self._timer(self._unsent, seconds, self._close)
        has_unread = not self._is_lost and (self.flow.write_paused or self.transport.is_closing())
        if has_unread != (self._unread is not None):
            seconds = self.stall_seconds + ANSWER_SECONDS if has_unread else None
            self._unread = self._timer(self._unread, seconds, self._abort)

    def _timer(
        self, old: asyncio.TimerHandle | None, seconds: float | None, work: Callable[[], None]
    ) -> asyncio.TimerHandle | None:
        if old is not None:
            old.cancel()
        return None if seconds is None else self.loop.call_later(seconds, work)

    def _seconds(self) -> float | None:
        """Return the time limit for what the client must send: a head, a body, or the rest of an answered one."""
        state = self.conn.their_state
        if state is h11.IDLE:
            return self.head_seconds
        if state is not h11.SEND_BODY:
            return None
        return ANSWER_SECONDS if self.conn.our_state is h11.DONE else self.head_seconds + ANSWER_SECONDS

    def _close(self) -> None:
        self.transport.close()
        self._watch()

    def _abort(self) -> None:
        if self.scope is not None:
            self.scope["state"][STALLED] = True
        self.transport.abort()
