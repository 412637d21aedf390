"""A complete server around the engine without a model, in its own process; and a handle of that process.

The process prints its ports, and at each SIGUSR1 the processor time that it has used so far.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from inspect import getsource
from typing import Any

import uvloop

from benchmarks.frontend.noop import NAME, served
from benchmarks.frontend.parts import Parts
from server.app import App
from server.config import ServerConfig
from server.worker.garbage import freeze_loaded, map_large_blocks

MAX_STREAMS = 1024
TEXT = getsource(textwrap)  # the text that is streamed repeatedly


@dataclass(frozen=True, slots=True)
class Used:
    """Processor seconds so far: of all threads, of the event loop, and of its parts if they are measured."""

    total: float
    loop: float
    parts: dict[str, float] = field(default_factory=dict)

    def since(self, before: Used) -> Used:
        """Return the difference to an earlier measurement."""
        parts = {name: seconds - before.parts.get(name, 0.0) for name, seconds in self.parts.items()}
        return Used(self.total - before.total, self.loop - before.loop, parts)


class Server:
    """A handle of the server process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        ports = self._told()
        self.grpc_port, self.http_port = ports["grpc"], ports["http"]

    def used(self) -> Used:
        """Ask the process for the processor time that it has used."""
        self._process.send_signal(signal.SIGUSR1)
        return Used(**self._told())

    def _told(self) -> dict[str, Any]:
        assert self._process.stdout is not None, "opened with a pipe"
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the server ended with {self._process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found


@contextlib.contextmanager
def serving(burst: int = 1, pause: float = 0.0, *, parts: bool = False) -> Iterator[Server]:
    """Run a server that gives `burst` tokens per step, at most one step every `pause` seconds."""
    settings = json.dumps({"burst": burst, "pause": pause, "parts": parts})
    command = [sys.executable, "-m", "benchmarks.frontend.process", settings]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Server(process)
        finally:
            process.terminate()


def main(settings: dict[str, float]) -> None:
    """Serve until SIGTERM."""
    parts = Parts()
    if settings["parts"]:
        parts.install()
    options = {"grpc_port": 0, "http_port": 0, "max_batch_size": MAX_STREAMS, "max_batch_tokens": MAX_STREAMS}
    config = ServerConfig.model_validate(
        options | {"target": NAME, "max_queue_requests": MAX_STREAMS, "max_queue_tokens": 1 << 31, "drain_seconds": 0}
    )
    load = lambda engine, _: served(engine, TEXT, settings)  # noqa: E731
    map_large_blocks()
    app = App(config, load=load, on_ready=_be_ready)
    uvloop.run(_run(app, parts))


def _be_ready(app: App) -> None:
    freeze_loaded()  # as `pilotfish serve` does
    _tell({"grpc": app.grpc_port, "http": app.http_port})


async def _run(app: App, parts: Parts) -> None:
    def report() -> None:
        _tell({"total": time.process_time(), "loop": time.thread_time(), "parts": dict(parts.seconds)})

    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, report)
    await app.run()


def _tell(value: dict[str, Any]) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
