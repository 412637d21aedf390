"""A server that is stopped, at any moment, ends all its processes by itself, soon, and logs no kill."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pilotfish import client
from tests.processes import alive_in

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

PROGRAM = "from pilotfish.server.cli import main; raise SystemExit(main())"
OPTIONS = ("--grpc-port", "0", "--http-port", "0", "--drain-seconds", "0.2", "--threads", "1", "--log-format", "json")
NUM_STREAMS = 16
SECONDS = 6.0  # for 0.1 to 1 s on two cores with other work; a process that does not end is killed after 5 s each


class Server:
    """The embedded models, in a process group of their own."""

    def __init__(self, log: Path, *options: str) -> None:
        command = [sys.executable, "-c", PROGRAM, "serve", *OPTIONS, *options]
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                command,
                stderr=errors,
                start_new_session=True,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored in a shell's background jobs
            )
        self._log, self.children = log, Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")

    def until(self, text: str) -> re.Match[str]:
        """Wait for this pattern in the log."""
        end = time.monotonic() + 60
        while (found := re.search(text, self._log.read_text("utf-8"))) is None:
            assert time.monotonic() < end, self._log.read_text("utf-8")
            time.sleep(0.005)
        return found

    def stop(self, number: signal.Signals = signal.SIGTERM) -> str:
        """Signal the group, as terminals and service managers do; return the log."""
        started = time.monotonic()
        os.killpg(self._process.pid, number)
        try:
            code = self._process.wait(40)
        finally:
            self._process.kill()
        seconds, log = time.monotonic() - started, self._log.read_text("utf-8")
        assert code == 0, log
        assert not re.search("[Kk]ill|Traceback", log), log
        assert seconds < SECONDS, log
        assert not alive_in(self._process.pid), log
        return log


def read(address: str, begun: threading.Semaphore) -> None:
    with client.Client(address, retry=None) as connection:
        try:
            for _ in connection.stream("ab", max_tokens=900, ignore_eos=True):
                begun.release()
        except client.UnavailableError:
            pass


def test_a_stop_under_streams_ends_the_engine_and_its_standby(tmp_path):
    server = Server(tmp_path / "log", "--standby")
    address = server.until(r'"grpc": "([\d.:]+)"')[1]
    begun = threading.Semaphore(0)
    readers = [threading.Thread(target=read, args=[address, begun]) for _ in range(NUM_STREAMS)]
    for reader in readers:
        reader.start()
    for _ in readers:
        assert begun.acquire(timeout=30)
    log = server.stop()
    for reader in readers:
        reader.join()
    assert re.findall(r"engine's process \d+ has ended: ([\w ]+)", log) in (["exit status 0"], ["exit status 0"] * 2)


def test_ctrl_c_while_it_loads(tmp_path):
    server = Server(tmp_path / "log")
    server.until("loading target")
    server.stop(signal.SIGINT)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["allocating", "warming up", "ready"])
def test_ctrl_c_at_later_moments(moment, tmp_path):
    server = Server(tmp_path / "log")
    server.until(moment)
    server.stop(signal.SIGINT)


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.2, 1.6, 2.0, 2.4])
def test_a_stop_at_any_moment_of_a_start(seconds, tmp_path):
    """From the moment on at which there is a second process."""
    server = Server(tmp_path / "log")
    while not server.children.read_text("ascii"):
        time.sleep(0.005)
    time.sleep(seconds)
    server.stop()
