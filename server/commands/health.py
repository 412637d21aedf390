"""`pilotfish health`: checks a server's health (grpc.health.v1) for containers and scripts; exits with 0 or 1."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from pilotfish.client import Client, RequestFailedError, Tls

ERRORS = (OSError,)  # certificates that cannot be read


def run(arguments: Sequence[str], _: Callable[[str], None]) -> tuple[str, bool]:
    """Return the server's answer as text, and whether it serves."""
    port = os.environ.get("PILOTFISH_GRPC_PORT", "50051")  # that of `pilotfish serve` in the same environment
    parser = argparse.ArgumentParser(prog="pilotfish health", description="Exit with 0 if the server serves, else 1.")
    parser.add_argument("address", nargs="?", default=f"127.0.0.1:{port}", help="HOST:PORT (default: %(default)s)")
    parser.add_argument("--service", default="", help="service to check, e.g. `liveness` (default: the whole server)")
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
