"""`pilotfish health`: a health check (grpc.health.v1) of a server for containers and scripts; the exit code answers."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from client import Client, RequestFailedError, Tls

ERRORS = (OSError,)  # of certificates that cannot be read


def run(arguments: Sequence[str], _: Callable[[str], None]) -> tuple[str, bool]:
    """Return the server's answer as text, and whether it serves."""
    port = os.environ.get("PILOTFISH_GRPC_PORT", "50051")  # that of `pilotfish serve` in the same environment
    parser = argparse.ArgumentParser(prog="pilotfish health", description="Exit with 0 if a server serves, else 1.")
    parser.add_argument("address", nargs="?", default=f"127.0.0.1:{port}", help="HOST:PORT (default: %(default)s)")
    parser.add_argument("--service", default="", help="service to check: default the whole server, or `liveness`")
    parser.add_argument("--timeout", type=float, default=3.0, help="seconds to wait (default: %(default)g)")
    parser.add_argument("--ca", type=Path, help="CA bundle (PEM); enables TLS")
    options = parser.parse_args(arguments)
    tls = None if options.ca is None else Tls(authority=options.ca)
    with Client(options.address, tls=tls, retry=None, control_deadline=options.timeout) as client:
        try:
            answer = client.health(options.service)
        except RequestFailedError as error:
            return str(error), False
    return answer, answer == "SERVING"
