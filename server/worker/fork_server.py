"""The fork server: a process that has imported the engine's modules, and forks the engine processes.

Importing torch and transformers takes seconds and 290 MB. Forked processes share both, so another engine costs only a
fork. The fork server runs on one thread, computes nothing and loads no model. It is a child of the front-end process
and ends with it; the engines are its children and end with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

from pilotfish.server.errors import EngineCrashed
from pilotfish.server.worker.garbage import importing, share_one_heap

# What the engine processes run, and what the fork server imports before the first fork.
ENGINE = "from pilotfish.server.worker.engine_process import main; main()"
AHEAD = ("pilotfish.server.worker.engine_process", "pilotfish.engine.startup.warm", "pilotfish.engine.text.guided")
ANSWER_SECONDS = 10.0  # a fork takes a few milliseconds, longer on a busy machine
_FORK, _END = b"fork", b"end "  # `end` is followed by the number of the process
_NUMBER_BYTES = 8


class ForkServerGone(ConnectionError):
    """Expected: the fork server has ended, and with it every forked process."""


@dataclass(slots=True)
class Forked:
    """A forked process, and this end of the sockets to it."""

    server: ForkServer
    pid: int
    socket: socket.socket
    returncode: int | None = None  # as in subprocess; None until `wait`

    def kill(self) -> None:
        """Kill the process if it has not been waited for; until then its number cannot be reused."""
        if self.returncode is None and self.server.is_alive:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Kill the process and wait for its end; return its exit status, or minus the number of its signal."""
        if self.returncode is None:
            self.returncode = self.server.end(self.pid)
        return self.returncode


class ForkServer(contextlib.AbstractContextManager["ForkServer"]):
    """The front-end process's side. Its methods block; any thread may call them.

    The thread that starts it must live as long as this process, because the kernel treats its end as that of the
    parent.
    """

    def __init__(self, source: str = ENGINE, ahead: Sequence[str] = AHEAD) -> None:
        """Start the process with the same module path as this one.

        It imports the modules `ahead`; forked processes run the Python code `source`.
        """
        program = f"from pilotfish.server.worker.fork_server import main; main({tuple(ahead)!r}, {source!r})"
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair()
        # `torch.cuda.is_available` may not initialise CUDA in a process that forks.
        variables = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603  # our own program
                [sys.executable, "-P", "-c", program, str(theirs.fileno())],
                env=os.environ | variables,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def fork(self) -> Forked:
        """Fork a process, whose last argument is the number of its socket.

        Raises ForkServerGone, or EngineCrashed if the system cannot create another process.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                pid = self._ask(_FORK, theirs.fileno())
        except BaseException:
            ours.close()
            raise
        if pid < 0:
            ours.close()
            raise EngineCrashed(f"no process could be forked: {os.strerror(-pid)}")
        return Forked(self, pid, ours)

    def end(self, pid: int) -> int:
        """Kill a forked process, wait for its end and return its status."""
        try:
            return self._ask(_END + pid.to_bytes(_NUMBER_BYTES, "big"))
        except ForkServerGone:
            return -signal.SIGKILL

    def close(self) -> None:
        """Kill the process, and with it all forked ones."""
        self._process.kill()
        self._process.wait()
        self._socket.close()

    def _ask(self, order: bytes, *descriptors: int) -> int:
        """Send an order and return the number in its answer."""
        with self._lock:
            try:
                socket.send_fds(self._socket, [order], descriptors)
                answer = self._socket.recv(_NUMBER_BYTES)
            except OSError as error:
                self._process.kill()  # if it hangs
                raise ForkServerGone("the fork server has ended or does not answer") from error
            self._socket.settimeout(ANSWER_SECONDS)  # from the second answer on, all imports are done
        if len(answer) < _NUMBER_BYTES:
            raise ForkServerGone("the fork server has ended")
        return int.from_bytes(answer, "big", signed=True)


# ----------------------------------------------------------------------------------------- in the fork server's process


def main(ahead: Sequence[str], source: str) -> None:
    """Run the fork server; the last argument of the process is the number of its socket. Never returns."""
    orders = socket.socket(fileno=int(sys.argv[1]))
    # Terminals and service managers send these signals to the whole process group. The front-end process handles them.
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    die_with_parent()
    share_one_heap()
    with importing():  # a later collection would write to every object, and so copy every shared page
        for module in ahead:
            import_module(module)
        from pilotfish.engine.machine.mapped import (
            release_libraries,
        )  # importing numpy takes longer than starting a process
    release_libraries()
    running: set[int] = set()  # live forked processes, whose numbers cannot be reused
    while True:
        order, descriptors, _, _ = socket.recv_fds(orders, len(_END) + _NUMBER_BYTES, 1)
        if not order:
            os._exit(0)
        number = _fork(orders, descriptors[0], source, running) if order == _FORK else _end(order, running)
        orders.sendall(number.to_bytes(_NUMBER_BYTES, "big", signed=True))


def _fork(orders: socket.socket, descriptor: int, source: str, running: set[int]) -> int:
    """Return the number of a new process, or minus the system's error number."""
    parent = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:  # running engines continue
        os.close(descriptor)
        return -(error.errno or errno.EAGAIN)
    if pid == 0:
        code = 1
        try:
            orders.close()
            die_with_parent(parent)
            sys.argv = ["-c", str(descriptor)]
            exec(compile(source, "<engine>", "exec"), {"__name__": "__main__"})  # noqa: S102  # our own program
            code = 0
        except BaseException:  # noqa: BLE001  # must not continue as a second fork server
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    os.close(descriptor)
    running.add(pid)
    return pid


def _end(order: bytes, running: set[int]) -> int:
    """Kill a process and return its status; -SIGKILL for one that has already ended."""
    pid = int.from_bytes(order.removeprefix(_END), "big")
    if pid not in running:
        return -signal.SIGKILL
    running.remove(pid)
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(parent: int | None = None) -> None:
    """Let the kernel kill this process when its parent ends, even during a step that hangs.

    `parent`: the expected parent; if it has already ended, end immediately. Only Linux supports this.
    On other systems the child ends when its socket is closed.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(1)
