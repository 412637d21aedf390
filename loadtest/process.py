"""A server in its own process: started, observed from outside, and stopped. Reads /proc of Linux and /metrics."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from prometheus_client.parser import text_string_to_metric_families

from pilotfish.client import Client
from pilotfish.server.commands.progress import signals_deferred

SERVE = ("-c", "from pilotfish.server.cli import main; raise SystemExit(main())", "serve")
# The server and the load generator share this machine: on two cores, each of them uses one thread.
DEFAULTS = ("--threads", "1")
_STOP_SECONDS = 60.0
PREFIX = "pilotfish_"


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """The resources of a process at one moment."""

    resident: int  # bytes
    descriptors: int


def usage(pid: int) -> ProcessUsage:
    """Return the resources of a process on this machine."""
    folder = Path("/proc") / str(pid)
    pages = int((folder / "statm").read_text("ascii").split()[1])
    return ProcessUsage(pages * os.sysconf("SC_PAGE_SIZE"), len(list((folder / "fd").iterdir())))


def engine_of(server: int) -> int | None:
    """Return the process id of a server's engine: the oldest child of its fork server. The others are standbys."""
    processes = _processes()
    children = (p for p in processes.values() if p.parent in processes and processes[p.parent].parent == server)
    engine = min(children, key=lambda process: process.started, default=None)
    return None if engine is None else engine.pid


@dataclass(frozen=True, slots=True)
class _Process:
    pid: int
    parent: int
    started: int  # in ticks of the kernel's clock


def _processes() -> dict[int, _Process]:
    """Return the processes of this machine that have not ended, by id."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):  # the process has ended meanwhile
                # After the name, which may contain spaces: proc(5), fields 3 (state), 4 (parent) and 22 (start).
                about = (folder / "stat").read_text("utf-8", errors="replace").rpartition(")")[2].split()
                if about[0] != "Z":
                    found[int(folder.name)] = _Process(int(folder.name), int(about[1]), int(about[19]))
    return found


def free_port() -> int:
    """Return a port that is free now; another program may take it before it is used."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@dataclass(frozen=True, slots=True)
class ScrapedMetrics:
    """The sum of all series of each name at one moment."""

    values: Mapping[str, float]

    @classmethod
    def read(cls, http_address: str) -> ScrapedMetrics:
        """Read the metrics of the server at `host:port`."""
        with urllib.request.urlopen(f"http://{http_address}/metrics", timeout=10) as answer:
            return cls.parse(answer.read().decode())

    @classmethod
    def parse(cls, text: str) -> ScrapedMetrics:
        """Parse Prometheus' text format."""
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
        return cls(found)

    def total(self, name: str) -> float:
        """Return the sum of all series of a name without the prefix; 0 if there are none yet."""
        return self.values.get(PREFIX + name, 0.0)


class ServerProcess:
    """`pilotfish serve` on loopback, by default with the embedded models; use it in a `with` block.

    Args:
        options: Options of `pilotfish serve`.
        log: The file for the server's log.
        program: Arguments of Python that start the server; default `pilotfish serve` itself.
    """

    def __init__(
        self,
        *options: str,
        log: Path | None = None,
        program: Sequence[str] = SERVE,
    ) -> None:
        self.address, self.http_address = (f"127.0.0.1:{free_port()}" for _ in range(2))
        ports = ("--grpc-port", _port(self.address), "--http-port", _port(self.http_address))
        self.command = [sys.executable, *program, *ports, *DEFAULTS, *options]
        self._log = log
        self.token: str | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def start(self) -> None:
        """Start or restart the process, and wait until it serves."""
        if self._log is not None:
            self._log.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as on_failure:  # a signal, too
            with Path(self._log or os.devnull).open("ab") as log, signals_deferred():
                self.process = subprocess.Popen(
                    self.command, stderr=log, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL
                )
                on_failure.callback(self.stop)
            self._wait()
            on_failure.pop_all()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        return self.process.pid

    def metrics(self) -> ScrapedMetrics:
        """Return the server's own metrics."""
        return ScrapedMetrics.read(self.http_address)

    def usage(self) -> ProcessUsage:
        """Return the resources of the server's process."""
        return usage(self.pid)

    def stop(self) -> int:
        """Drain and stop the server, and return its exit code. It is killed if it does not stop in time."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(_STOP_SECONDS)
        finally:
            self.kill()

    def kill(self) -> None:
        """Kill the process if it has not ended."""
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def _wait(self, seconds: float = 120.0) -> None:
        end = time.monotonic() + seconds
        with Client(self.address) as client:
            while True:
                if self.process.poll() is not None:
                    raise RuntimeError(f"the server ended with {self.process.returncode}; its log: {self._log}")
                try:
                    return client.wait_until_serving(timeout=1.0)
                except TimeoutError:
                    if time.monotonic() > end:
                        raise


@dataclass(frozen=True, slots=True)
class RemoteServer:
    """A server that runs somewhere, `address` HOST:PORT of gRPC. Only its answers are known."""

    address: str
    token: str | None = None

    def __enter__(self) -> Self:
        """Raise RequestFailedError if the server does not answer."""
        with Client(self.address, token=self.token, retry=None) as client:
            client.model_info()
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to stop."""


def _port(address: str) -> str:
    return address.rpartition(":")[2]
