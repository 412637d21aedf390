"""A command of the client on a pseudo-terminal: what a person types, and what the person sees."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PATIENCE = 60.0  # seconds
# The terminal becomes the controlling one, so that its Ctrl-C is a signal. A shell's background jobs ignore SIGINT, and
# so would what they start, these tests as well as any.
_START = """
import os, signal, sys
os.close(os.open(os.ttyname(1), os.O_RDWR))
signal.signal(signal.SIGINT, signal.default_int_handler)
from pilotfish.server.cli import main
sys.exit(main(sys.argv[1:]))
"""


class PseudoTerminal:
    """A running command, and the side of a person."""

    def __init__(self, process: subprocess.Popen[bytes], ours: int) -> None:
        self.process, self._ours = process, ours
        self._data, self._at = b"", 0  # what was printed, and how much of it, without colours, was read

    def type(self, text: str) -> None:
        """Type it. For Ctrl-C, wait until the program waits: `input` has a gap between its sign and its wait.

        A signal inside that gap is noticed with the next key (CPython's readline module).
        """
        until = time.monotonic() + PATIENCE
        while text == "\x03" and not self._is_waiting and time.monotonic() < until:
            time.sleep(0.005)
        os.write(self._ours, text.encode())

    @property
    def _is_waiting(self) -> bool:
        """Whether the main thread sleeps, which one that only lacks a processor does not."""
        pid = self.process.pid
        return Path(f"/proc/{pid}/task/{pid}/stat").read_text("ascii").rpartition(")")[2].split()[0] == "S"

    def read(self, until: str) -> str:
        """Return the next text up to `until`, without colours."""
        while (end := self._printed.find(until, self._at)) < 0:
            if not select.select([self._ours], [], [], PATIENCE)[0] or not self._more():
                raise AssertionError(f"no {until!r} in {self._printed[self._at :]!r}")
        start, self._at = self._at, end + len(until)
        return self._printed[start : self._at]

    @property
    def _printed(self) -> str:
        return plain(self._data.decode(errors="ignore"))

    def read_all(self) -> str:
        """Return everything, with colours, when the command has ended."""
        while self._more():
            pass
        return self._data.decode()

    def _more(self) -> bool:
        try:
            found = os.read(self._ours, 4096)
        except OSError:  # how a pseudo-terminal says that its other side is closed
            return False
        self._data += found
        return bool(found)


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


@contextmanager
def on_a_terminal(*command: str) -> Iterator[PseudoTerminal]:
    """Run `pilotfish COMMAND` on a pseudo-terminal."""
    ours, theirs = pty.openpty()
    env = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    env |= {"TERM": "xterm-256color", "COLUMNS": "100", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", _START, *command],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=env,
        start_new_session=True,
    )
    os.close(theirs)
    try:
        yield PseudoTerminal(process, ours)
    finally:
        process.kill()
        process.wait()
        os.close(ours)
