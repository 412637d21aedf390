"""A child process and a pair of sockets to it. Imports little, because the child starts before all other imports."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True, slots=True)
class Child:
    """A started process, and this process's end of the sockets to it."""

    process: subprocess.Popen[bytes]
    socket: socket.socket

    @classmethod
    def start(cls, source: str, variables: Mapping[str, str] | None = None) -> Child:
        """Start Python with the same module path as this process; the last argument is the number of its socket.

        `variables` are added to the environment.
        """
        path = os.pathsep.join(filter(None, sys.path))
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(  # noqa: S603  # our own program
                [sys.executable, "-P", "-c", source, str(theirs.fileno())],
                env=os.environ | {"PYTHONPATH": path} | dict(variables or {}),
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        return cls(process, ours)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Kill the process, wait for its end, and close the socket."""
        self.process.kill()
        self.process.wait()
        self.socket.close()


def said(status: int) -> str:
    """Return an exit status as text: 3 -> exit status 3, -9 -> SIGKILL."""
    if status >= 0:
        return f"exit status {status}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-status).name
    return f"signal {-status}"


def die_with_parent(parent: int | None = None) -> None:
    """Let the kernel kill this process when its parent ends, even in a step that does not end.

    `parent`: end at once if the parent is another one, because it has ended before this call. Only Linux supports this.
    On other systems the child ends when its socket is closed.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(1)
