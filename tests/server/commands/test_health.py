"""`pilotfish health`: what the exit code says in every state of a server, over TLS and where nobody is, as `verify`."""

from __future__ import annotations

import asyncio
import socket

import pytest

from pilotfish.server import cli
from pilotfish.server.lifecycle import State
from tests.server.fake_engine import FakeEngine, served
from tests.server.test_generate import collect, request
from tests.server.test_life import LONG
from tests.serving import serving, until


async def exit_code(server, *options):
    return await asyncio.to_thread(cli.main, ["health", f"127.0.0.1:{server.app.grpc_port}", *options])


async def test_from_start_to_drain(capsys):
    release, loop = asyncio.Event(), asyncio.get_running_loop()

    def load(_config, _progress):
        asyncio.run_coroutine_threadsafe(release.wait(), loop).result(20)
        return served(FakeEngine(step_seconds=0.005))

    async with serving(load=load, ready=False) as server:
        assert await exit_code(server) == 1
        assert await exit_code(server, "--service", "liveness") == 0, "who loads is not to be killed"
        release.set()
        await until(lambda: server.app.lifecycle.state is State.READY)
        assert await exit_code(server) == 0
        assert await exit_code(server, "--service", "pilotfish.v1.InferenceService") == 0
        assert await exit_code(server, "--service", "nobody") == 1
        capsys.readouterr()
        call = asyncio.ensure_future(collect(server.inference.GenerateStream(request(stopping=LONG))))
        await until(lambda: server.app.driver.live())
        server.app.stop()
        await until(lambda: server.app.lifecycle.state is State.DRAINING)
        assert await exit_code(server) == 1
        assert await exit_code(server, "--service", "liveness") == 0, "who drains is not to be killed"
        assert capsys.readouterr().out == "NOT_SERVING\nSERVING\n"
        server.app.stop()  # and cut it
        await until(call.done)
        assert call.exception() is not None


async def test_an_engine_that_cannot_begin_again_is_not_alive():
    async with serving(engine := FakeEngine(), max_engine_crashes=0) as server:
        engine.fault = RuntimeError("out of memory")
        call = asyncio.ensure_future(collect(server.inference.GenerateStream(request(stopping=LONG))))
        await until(call.done)
        assert call.exception() is not None
        assert await exit_code(server) == 1
        assert await exit_code(server, "--service", "liveness") == 1


async def test_over_tls(papers, tmp_path):
    async with serving(tls_cert=papers.server_cert, tls_key=papers.server_key) as server:
        assert await exit_code(server, "--ca", str(papers.authority)) == 0
        assert await exit_code(server) == 1, "in the clear"
        assert await exit_code(server, "--ca", str(tmp_path / "none")) == 2


@pytest.mark.parametrize(
    ("command", "named", "code"),
    [(["health", "--timeout", "2"], True, 1), (["health", "--timeout", "2"], False, 1), (["verify"], False, 2)],
    ids=["health of an address", "health of the port that serve would take", "verify of that port"],
)
def test_no_server_at_the_address(command, named, code, monkeypatch, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound but not listening
        port = str(taken.getsockname()[1])
        monkeypatch.setenv("PILOTFISH_GRPC_PORT", "1" if named else port)
        assert cli.main([*command, *([f"127.0.0.1:{port}"] if named else [])]) == code
    assert port in "".join(capsys.readouterr())
