"""Authentication of HTTP requests: without a valid token a client reaches only `/health` and the playground's files."""

from __future__ import annotations

from ipaddress import ip_address

from starlette.types import ASGIApp, Receive, Scope, Send

from engine.errors import shown
from server.admission.security import Callers
from server.errors import Forbidden, Unauthenticated
from server.http import playground
from server.http.messages.errors import error_at

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
