"""Locust without its web page: a master and workers as processes, and what they wrote. Knows no users."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from loadtest.process import ServerProcess, free_port

FILE = Path(__file__).with_name("locustfile.py")
_GRACE = 60.0  # seconds for the last answers, and for Python to start and end


@dataclass(frozen=True, slots=True)
class Swarm:
    """So many users, for so long, by so many processes."""

    users: int
    seconds: float
    workers: int
    scenario: str

    def run(self, server: ServerProcess, folder: Path) -> list[dict[str, str]]:
        """Load the server; Locust's table of statistics, row by row.

        Raises:
            RuntimeError: Locust ended with an error.
        """
        folder.mkdir(parents=True, exist_ok=True)
        port = str(free_port())
        common = ["--grpc-address", server.address, "--http-address", server.http_address, "--scenario", self.scenario]
        workers = [
            _start(folder / f"worker-{i}.log", "--worker", "--master-port", port, *common) for i in range(self.workers)
        ]
        try:
            master = _start(folder / "master.log", "--master", *self._master(port, folder), *common)
            code = master.wait(self.seconds + _GRACE)
        finally:
            for process in workers:
                process.kill()
                process.wait()
        if code:
            raise RuntimeError(f"locust ended with {code}; its log: {folder / 'master.log'}")
        with (folder / "locust_stats.csv").open(encoding="utf-8") as file:
            return list(csv.DictReader(file))

    def _master(self, port: str, folder: Path) -> list[str]:
        load = ["-u", str(self.users), "-r", str(max(1, self.users // 5)), "-t", f"{self.seconds:g}s"]
        waits = ["--expect-workers", str(self.workers), "--stop-timeout", "30", "--exit-code-on-error", "0"]
        files = ["--csv", str(folder / "locust"), "--html", str(folder / "locust.html")]
        return ["--master-bind-host", "127.0.0.1", "--master-bind-port", port, "--headless", *load, *waits, *files]


def _start(log: Path, *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "locust", "-f", str(FILE), "--skip-log-setup", *options]
    root = str(FILE.parents[1])
    paths = os.pathsep.join([root, str(Path(root) / "proto"), os.environ.get("PYTHONPATH", "")])
    with log.open("wb") as out:
        return subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | {"PYTHONPATH": paths})


def failures(rows: list[dict[str, str]]) -> int:
    """Calls that failed, of all users."""
    return sum(int(row["Failure Count"]) for row in rows if row["Name"] == "Aggregated")


def lines(rows: list[dict[str, str]]) -> list[str]:
    """Locust's statistics in Markdown; times in milliseconds."""
    head = ["| | count | failed | per second | p50 | p90 | p99 |", "|---|---|---|---|---|---|---|"]
    shown = [row for row in rows if row["Name"] != "Aggregated"]
    return head + [
        f"| {row['Type']} {row['Name']} | {row['Request Count']} | {row['Failure Count']} | "
        f"{float(row['Requests/s']):.1f} | {row['50%']} | {row['90%']} | {row['99%']} |"
        for row in shown
    ]
