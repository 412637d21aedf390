"""The fork server: a process that has imported the engine's modules, and forks the engine processes.

Importing torch and transformers takes seconds and 290 MB. Forked processes share both, so another engine costs only a
fork. The fork server runs on one thread, computes nothing and loads no model. It is a child of the front-end process
and ends with it; the engines are its children and end with it. Each ends by itself when its socket is closed. The
kernel kills it if its parent has ended before.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
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
END_SECONDS = 5.0  # for a process to end by itself; then it is killed
_POLL_SECONDS = 0.002
_FORK, _STATUS = b"fork", b"stat"  # `stat` is followed by the number of the process
_NUMBER_BYTES = 8
_RUNNING = 1 << 32  # the status of a live process; no exit status

logger = logging.getLogger(__name__)


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

    def wait(self, seconds: float = END_SECONDS) -> int:
        """Wait until the process, whose socket is closed, has ended by itself; kill it after `seconds`.

        Returns its exit status, or minus the number of its signal.
        """
        if not self._has_ended(seconds):
            logger.warning("process %d has not ended within %g s and is killed (SIGKILL)", self.pid, seconds)
            self.kill()
            if not self._has_ended(ANSWER_SECONDS):  # for example inside a device driver
                self.returncode = -signal.SIGKILL
        assert self.returncode is not None, "has ended"
        return self.returncode

    def _has_ended(self, seconds: float) -> bool:
        """Wait for at most `seconds`."""
        deadline = time.monotonic() + seconds
        while self.returncode is None and time.monotonic() < deadline:
            self.returncode = self.server.status(self.pid)
            if self.returncode is None:
                time.sleep(_POLL_SECONDS)
        return self.returncode is not None


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
        # Terminals and service managers send these signals to the whole process group. The front-end process handles
        # them; they stay blocked in the fork server and in what it forks.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
        try:
            with theirs:
                self._process = subprocess.Popen(  # noqa: S603  # our own program
                    [sys.executable, "-P", "-c", program, str(theirs.fileno())],
                    env=os.environ | variables,
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

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

    def status(self, pid: int) -> int | None:
        """Return the exit status of a forked process, or minus the number of its signal; None while it runs."""
        try:
            status = self._ask(_STATUS + pid.to_bytes(_NUMBER_BYTES, "big"))
        except ForkServerGone:
            return -signal.SIGKILL  # by the kernel
        return None if status == _RUNNING else status

    def close(self) -> None:
        """Let the process end, after the forked ones, whose sockets must be closed. Kill it after `END_SECONDS`."""
        with contextlib.suppress(OSError):  # it has ended
            self._socket.shutdown(socket.SHUT_RDWR)  # also wakes a thread that waits for an answer
        self._process.send_signal(signal.SIGUSR1)  # during its imports, it does not read
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            logger.warning("the fork server has not ended within %g s and is killed (SIGKILL)", END_SECONDS)
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
                if isinstance(error, TimeoutError):
                    self._process.kill()
                raise ForkServerGone("the fork server has ended or does not answer") from error
            self._socket.settimeout(ANSWER_SECONDS)  # from the second answer on, all imports are done
        if len(answer) < _NUMBER_BYTES:
            raise ForkServerGone("the fork server has ended")
        return int.from_bytes(answer, "big", signed=True)


# ----------------------------------------------------------------------------------------- in the fork server's process


def main(ahead: Sequence[str], source: str) -> None:
    """Run the fork server; the last argument of the process is the number of its socket. Never returns."""
    orders = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGUSR1, lambda *_: os._exit(0))  # from `close`
    die_with_parent()
    share_one_heap()
    with importing():  # a later collection would write to every object, and so copy every shared page
        for module in ahead:
            import_module(module)
        from pilotfish.engine.machine.mapped import (
            release_libraries,
        )  # importing numpy takes longer than starting a process
    release_libraries()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # from here on the end of `orders` is enough
    running: set[int] = set()  # forked processes that were not waited for, whose numbers cannot be reused
    while True:
        order, descriptors, _, _ = socket.recv_fds(orders, len(_STATUS) + _NUMBER_BYTES, 1)
        if not order:
            for pid in running:
                os.waitpid(pid, 0)
            os._exit(0)
        number = _fork(orders, descriptors[0], source, running) if order == _FORK else _status(order, running)
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


def _status(order: bytes, running: set[int]) -> int:
    """Return the status of a process; -SIGKILL if it was returned before."""
    pid = int.from_bytes(order.removeprefix(_STATUS), "big")
    if pid not in running:
        return -signal.SIGKILL
    ended, status = os.waitpid(pid, os.WNOHANG)
    if not ended:
        return _RUNNING
    running.remove(pid)
    return os.waitstatus_to_exitcode(status)


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
