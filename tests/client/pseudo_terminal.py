"""A command of the client on a pseudo-terminal: what a person types, and what the person sees."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

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
        self.seen = ""  # since the command started
        self._data = b""

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def read(self, until: str) -> str:
        """Return the new text up to `until`, without colours."""
        start = len(self._data)
        while until not in plain(self._data[start:].decode(errors="ignore")):
            if not select.select([self._ours], [], [], PATIENCE)[0]:
                raise AssertionError(f"no {until!r} in {self._data[start:]!r}")
            if not self._more():
                raise AssertionError(f"the command ended without {until!r}: {self._data[start:]!r}")
        self.seen = self._data.decode()
        return plain(self._data[start:].decode())

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
