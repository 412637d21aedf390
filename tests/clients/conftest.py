"""The servers that clients call: one with the embedded pair, and one whose target is scripted."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import pytest

from loadtest.process import ServerProcess
from pilotfish.client import Client


class Served:
    """A server in its own process, with its addresses and our own clients for it."""

    def __init__(self, process: ServerProcess) -> None:
        self.address = process.address
        self.url = f"http://{process.http_address}"

    def grpc(self) -> Client:
        return Client(self.address)

    def post(self, path: str, **body) -> dict:
        answer = httpx.post(f"{self.url}{path}", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def metric(self, name: str) -> float:
        """The sum of all series of one name."""
        lines = httpx.get(f"{self.url}/metrics", timeout=10).text.splitlines()
        values = [line.rpartition(" ")[2] for line in lines if line.startswith((f"{name} ", f"{name}{{"))]
        assert values, f"no metric {name}"
        return sum(map(float, values))


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """`pilotfish serve` with the embedded pair, as people start it for these clients.

    The server always drafts. AUTO may decide on a busy machine that drafts do not pay for a whole benchmark, and then
    vLLM's client leaves speculation out of its report.
    """
    log = tmp_path_factory.mktemp("server") / "log"
    with ServerProcess("--vllm-metrics", "--speculation", "FIXED", log=log) as process:
        yield Served(process)


@pytest.fixture(scope="session")
def scripted(tmp_path_factory):
    """A server whose target calls a tool and then tells its result, whoever offers one (`scripted.py`)."""
    log = tmp_path_factory.mktemp("scripted") / "log"
    with ServerProcess(log=log, program=("-m", "tests.clients.scripted")) as process:
        yield Served(process)


@pytest.fixture
def home():
    """The only folder that a client has: its working directory, HOME and temporary files.

    Its path is short, because AIPerf makes sockets below it, whose paths may have 107 characters.
    """
    with TemporaryDirectory(prefix="client-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)
