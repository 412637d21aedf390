"""The playground at `/`: static files with headers that restrict the browser. Knows no request and no model.

The page calls `/health` and `/generate` like any other client. A client can load the page without a token, because the
page contains no secrets; `/generate` needs a token (docs/adr/0027-a-page-without-a-build-step.md).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fastapi import FastAPI, Response

_HERE = Path(__file__).resolve().parent
_FILES = {  # path -> file name and media type
    "/": ("index.html", "text/html"),
    "/playground.css": ("playground.css", "text/css"),
    "/playground.js": ("playground.js", "text/javascript"),
    "/pilotfish.svg": ("pilotfish.svg", "image/svg+xml"),
}
PATHS = frozenset(_FILES)
# No content from other hosts, no inline scripts, no frames: so text from a model cannot run as code.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def add_playground(app: FastAPI) -> None:
    """Add routes that serve the files; each file is read once, now."""
    for path, (name, media_type) in _FILES.items():
        app.add_api_route(path, _file(name, media_type), methods=["GET"], include_in_schema=False)


def _file(name: str, media_type: str) -> Callable[[], Response]:
    content = (_HERE / name).read_bytes()

    def serve() -> Response:
        return Response(content, headers=_HEADERS, media_type=media_type)

    return serve
