"""A certificate authority for an afternoon: openssl makes it, tests throw it away."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

KEY = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1"  # found sooner than two primes


@dataclass(frozen=True)
class Certificates:
    """Paths of PEM files: who signs, and two pairs that it has signed."""

    authority: Path
    server_cert: Path
    server_key: Path
    client_cert: Path
    client_key: Path


def make(folder: Path) -> Certificates:
    """Sign a certificate for 127.0.0.1 and one for a client."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl here")
    _run(folder, f"req -x509 {KEY} -nodes -keyout ca.key -out ca.pem -days 2 -subj /CN=authority")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost")
    for name in ("server", "client"):
        _run(folder, f"req {KEY} -nodes -keyout {name}.key -out {name}.csr -subj /CN={name}")
        signed = f"x509 -req -in {name}.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile names"
        _run(folder, f"{signed} -out {name}.pem")
    names = ("ca.pem", "server.pem", "server.key", "client.pem", "client.key")
    return Certificates(*(folder / name for name in names))


def _run(folder: Path, arguments: str) -> None:
    subprocess.run(["openssl", *arguments.split()], cwd=folder, check=True, capture_output=True)
