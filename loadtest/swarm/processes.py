"""Runs Locust without its web page: starts a master and workers as processes, and reads the statistics they wrote."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from loadtest.process import ServerProcess, free_port

FILE = Path(__file__).with_name("locustfile.py")
_GRACE = 120.0  # seconds for the last responses, and for Python to start and end
MOST_USERS = 100
WAITING = 5.0  # seconds that requests may wait in the queue: half of the server's default limit
CALLING = 30.0  # seconds that a call may take, including its wait; Locust waits this long for active calls at the end
COMING = 5.0  # minimum seconds over which users start


@dataclass(frozen=True, slots=True)
class Swarm:
    """A Locust run: the number of users, its duration, and its number of processes."""

    users: int
    seconds: float
    workers: int
    scenario: str
    coming: float = COMING  # seconds over which users start

    def run(self, server: ServerProcess, folder: Path) -> list[dict[str, str]]:
        """Load the server and return the rows of Locust's statistics.

        Raises:
            RuntimeError: Locust ended with an error, or too early.
        """
        folder.mkdir(parents=True, exist_ok=True)
        port = str(free_port())
        common = ["--grpc-address", server.address, "--http-address", server.http_address, "--scenario", self.scenario]
        common += ["--load-seconds", f"{self.seconds:g}"]
        workers = [
            _start(folder / f"worker-{i}.log", "--worker", "--master-port", port, *common) for i in range(self.workers)
        ]
        try:
            master = _start(folder / "master.log", "--master", *self._master(port, folder), *common)
            began = time.monotonic()
            code = master.wait(self.seconds + _GRACE)
        finally:
            for process in workers:
                process.kill()
                process.wait()
        lasted = time.monotonic() - began
        if code or lasted < self.seconds:
            problem = f"locust ended with {code} after {lasted:.0f} of {self.seconds:g} s"
            raise RuntimeError(f"{problem}; its log: {folder / 'master.log'}")
        with (folder / "locust_stats.csv").open(encoding="utf-8") as file:
            return list(csv.DictReader(file))

    def _master(self, port: str, folder: Path) -> list[str]:
        load = ["-u", str(self.users), "-r", f"{max(1.0, self.users / self.coming):.3g}"]
        waits = ["--expect-workers", str(self.workers), "--stop-timeout", f"{CALLING:g}", "--exit-code-on-error", "0"]
        files = ["--csv", str(folder / "locust"), "--html", str(folder / "locust.html")]
        return ["--master-bind-host", "127.0.0.1", "--master-bind-port", port, "--headless", *load, *waits, *files]


def bearable(places: int, rate: float) -> int:
    """Return how many users a server can bear that ends `rate` requests per second with a full batch: 64, 4.0 -> 84.

    In a closed loop, a user's call takes users / rate seconds; it is in the batch for places / rate seconds of that and
    waits for the rest.
    """
    return max(1, min(MOST_USERS, int(places + WAITING * rate), int(CALLING * rate)))


def coming(places: int, rate: float) -> float:
    """Return the seconds over which users start: the time of one request, or all calls would always end together."""
    return max(COMING, places / rate)


def _start(log: Path, *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "locust", "-f", str(FILE), "--loglevel", "WARNING", *options]
    root = str(FILE.parents[2])
    paths = os.pathsep.join([root, str(Path(root) / "proto"), os.environ.get("PYTHONPATH", "")])
    with log.open("wb") as out:
        return subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | {"PYTHONPATH": paths})


def failures(rows: list[dict[str, str]]) -> int:
    """Return the number of failed calls of all users."""
    return sum(int(row["Failure Count"]) for row in rows if row["Name"] == "Aggregated")


def lines(rows: list[dict[str, str]]) -> list[str]:
    """Return Locust's statistics as Markdown lines; times in milliseconds."""
    head = ["| | count | failed | per second | p50 | p90 | p99 |", "|---|---|---|---|---|---|---|"]
    shown = [row for row in rows if row["Name"] != "Aggregated"]
    return head + [
        f"| {row['Type']} {row['Name']} | {row['Request Count']} | {row['Failure Count']} | "
        f"{float(row['Requests/s']):.1f} | {row['50%']} | {row['90%']} | {row['99%']} |"
        for row in shown
    ]
