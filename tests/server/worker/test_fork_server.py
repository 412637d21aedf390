"""The fork server: what it forks shares what it has imported, ends with it, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import grpc
import pytest

from pilotfish.server.errors import EngineCrashed
from pilotfish.server.lifecycle import State
from pilotfish.server.worker import fork_server
from pilotfish.server.worker.fork_server import Forked, ForkServer, ForkServerGone
from tests.server.test_generate import collect, request
from tests.server.test_life import LONG, code_of, read_to_end
from tests.server.worker import fake_child
from tests.server.worker.test_engine_process import SOME, answers, apart, begun, prompt, restarted, slow, state_of
from tests.serving import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

# Says who its parent is and whether a module was there before the fork, then waits for its end.
ECHO = """
import os, socket, sys
sock = socket.socket(fileno=int(sys.argv[1]))
sock.sendall(f"{os.getppid()} {'wave' in sys.modules}".encode())
sock.recv(1)
"""


def said(forked: Forked) -> list[str]:
    return forked.socket.recv(100).decode().split()


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_forked_process_shares_imports_and_its_status_is_returned():
    with ForkServer(ECHO, ("wave",)) as forks:
        one, other = forks.fork(), forks.fork()
        with one.socket, other.socket:
            assert [said(one), said(other)] == [[str(forks.pid), "True"]] * 2
            assert one.wait() == -signal.SIGKILL
            assert (one.wait(), state_of(one.pid)) == (-signal.SIGKILL, "")
            other.socket.sendall(b"x")
            assert other.wait() in (0, -signal.SIGKILL)  # it was about to end by itself


def test_a_process_that_ends_by_itself_keeps_its_number_until_it_is_waited_for():
    with ForkServer("raise SystemExit", ()) as forks:
        forked = forks.fork()
        with forked.socket:
            assert forked.socket.recv(1) == b""
            while state_of(forked.pid) != "Z":
                time.sleep(0.001)
            forked.kill()
            assert forked.wait() == 1  # an exception, printed


def test_what_is_forked_ends_with_the_fork_server():
    forks = ForkServer(ECHO, ())
    forked = forks.fork()
    with forked.socket:
        said(forked)
        os.kill(forks.pid, signal.SIGKILL)
        assert forked.socket.recv(1) == b""
        with pytest.raises(ForkServerGone):
            forks.fork()
        assert forked.wait() == -signal.SIGKILL
        forked.kill()  # of nobody
    forks.close()
    assert not forks.is_alive


def test_signals_to_the_whole_group_end_neither():
    with ForkServer(ECHO, ()) as forks:
        forked = forks.fork()
        with forked.socket:
            said(forked)
            for pid in (forks.pid, forked.pid):
                os.kill(pid, signal.SIGINT)
                os.kill(pid, signal.SIGTERM)
            other = forks.fork()
            with other.socket:
                assert other.wait() == -signal.SIGKILL


# A module that lets only one process be forked, as a limit on processes does.
ONE = """
import errno, os
fork, forked = os.fork, []

def once():
    if forked:
        raise BlockingIOError(errno.EAGAIN, "no room")
    forked.append(True)
    return fork()

os.fork = once
"""


def test_where_no_process_can_be_forked_the_others_go_on(tmp_path, monkeypatch):
    (tmp_path / "no_room.py").write_text(ONE)
    monkeypatch.syspath_prepend(tmp_path)
    with ForkServer(ECHO, ("no_room",)) as forks:
        forked = forks.fork()
        with forked.socket:
            said(forked)
            with pytest.raises(EngineCrashed, match="no process could be forked: Resource temporarily unavailable"):
                forks.fork()
            assert state_of(forked.pid) in ("R", "S")
            assert forked.wait() == -signal.SIGKILL
            assert forks.end(forked.pid) == -signal.SIGKILL  # again: no process is killed
            assert forks.is_alive


def test_a_fork_server_that_does_not_answer_is_killed(monkeypatch):
    monkeypatch.setattr(fork_server, "ANSWER_SECONDS", 0.2)
    with ForkServer(ECHO, ()) as forks:
        forked = forks.fork()
        with forked.socket:
            said(forked)
            os.kill(forks.pid, signal.SIGSTOP)
            assert forked.wait() == -signal.SIGKILL  # it ends with its parent
            assert forked.socket.recv(1) == b""
            with pytest.raises(ForkServerGone):
                forks.fork()


async def test_without_its_fork_server_a_server_starts_another_one_and_the_log_of_all_is_one(capfd):
    async with apart(log_format="json", with_own_forks=True) as server:
        crashing = server.inference.GenerateStream(request(**prompt(fake_child.RAISE), stopping=LONG))
        assert await code_of(collect(crashing)) == grpc.StatusCode.INTERNAL
        await until(lambda: server.app.lifecycle.state is State.READY)
        call = server.inference.GenerateStream(slow(stopping=SOME))
        await begun([call])
        os.kill(parent_of(server.host.pid), signal.SIGKILL)
        (end,) = await read_to_end(call)
        assert (end.usage.completion_tokens, end.interruptions) == (SOME.max_tokens, 1)
        assert await answers(server)
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line.startswith("{")]
    failure, _ = [line for line in lines if line["logger"] == "pilotfish.server.worker.engine_process"]
    assert "ZeroDivisionError" in failure["error"]


async def standby_of(server):
    """Number of the process of the standby, once it is loaded."""

    def loaded():
        return server.host._standby and server.host._standby._worker

    await until(lambda: loaded() and loaded().loss is None)
    return loaded().process.pid


async def test_a_standby_takes_over_and_gets_a_successor():
    async with apart(standby=True) as server:
        for times in (1, 2):
            standby = await standby_of(server)
            call = server.inference.GenerateStream(slow(stopping=SOME))
            await begun([call])
            server.kill()
            (end,) = await read_to_end(call)
            assert (end.usage.completion_tokens, end.interruptions) == (SOME.max_tokens, 1)
            assert server.host.pid == standby
            await restarted(server, times)
        assert await answers(server)
