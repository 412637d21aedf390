"""Authentication of HTTP requests: without a valid token a client reaches only `/health` and the playground's files."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from server.admission.security import Callers
from server.errors import Unauthenticated
from server.http import playground
from server.http.errors import http_error

OPEN_PATHS = frozenset({"/health"}) | playground.PATHS


class HttpGuard:
    """Middleware that passes only authenticated requests; it stores the caller in the scope for the routes."""

    def __init__(self, app: ASGIApp, callers: Callers) -> None:
        self._app, self._callers = app, callers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 401 unless the path is open or the token is known."""
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            try:
                scope["caller"] = self._callers.of_metadata(_headers(scope))
            except Unauthenticated as error:
                await http_error(error).response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _headers(scope: Scope) -> list[tuple[str, str | bytes]]:
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
