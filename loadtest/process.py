"""A server in its own process: started, observed from outside, and stopped. Reads Linux' /proc."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from client import Client
from loadtest.metrics import ScrapedMetrics

SERVE = ("-c", "from server.cli import main; raise SystemExit(main())", "serve")
# Server and driver share this machine: on two cores, each of them gets one thread.
DEFAULTS = ("--threads", "1")
_STOP_SECONDS = 60.0


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


def free_port() -> int:
    """Return a port that is free now; another program may take it before it is used."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


class ServerProcess:
    """`pilotfish serve` on loopback with the embedded pair, unless the options say otherwise; use it in a `with` block.

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

    def __enter__(self) -> Self:
        self.start()
        return self

    def start(self) -> None:
        """Start the process, again if it has ended, and wait until it serves."""
        if self._log is not None:
            self._log.parent.mkdir(parents=True, exist_ok=True)
        with Path(self._log or os.devnull).open("ab") as log:
            self.process = subprocess.Popen(self.command, stderr=log, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
        try:
            self._wait()
        except BaseException:
            self.kill()
            raise

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
        """Let the server drain and stop, and return its exit code. A server that does not stop in time is killed."""
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
                    return client.wait_until_serving(deadline=1.0)
                except TimeoutError:
                    if time.monotonic() > end:
                        raise


def _port(address: str) -> str:
    return address.rpartition(":")[2]
