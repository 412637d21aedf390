"""A server for tests, on ports of its own: around a fake engine, or around a model that it loads; and its clients."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace

import grpc
import httpx

from pilotfish.client import AsyncClient
from pilotfish.models import embedded_draft, embedded_target
from pilotfish.server.app import App
from pilotfish.server.config import ServerConfig
from pilotfish.server.lifecycle import State
from pilotfish.server.worker.fork_server import ForkServer
from pilotfish.server.worker.remote import RemoteEngine
from pilotfish.v1 import control_pb2_grpc, generation_pb2_grpc
from tests.engine.text.test_codec import CODEC
from tests.server.fake_engine import FakeEngine, served
from tests.server.worker.in_process import InProcess, load_models

EMBEDDED = {"target": str(embedded_target()), "draft": str(embedded_draft()), "threads": 1, "warm_up_seconds": 0.0}


async def until(condition, seconds: float = 60.0) -> None:
    """Wait for something that another task brings about, on a machine that may be slow and busy."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110  # the condition is the server's, which sets no event for us
            await asyncio.sleep(0.002)


@asynccontextmanager
async def serving(
    engine=None,
    *,
    codec=CODEC,
    compile_grammar=None,
    chat=None,
    load=None,
    options=(),
    ready=True,
    tracing_with=None,
    apart=False,
    start_forks=ForkServer,
    **config,
):
    """A running App and a channel to it; drained and stopped at the end.

    Its engine is in this process, `engine` or that which `load` loads; with `apart`, or `start_forks`, in its own one.
    """
    engine = engine or FakeEngine()
    settings = {"target": "fake", "grpc_port": 0, "http_port": 0, "drain_seconds": 5.0}
    settings |= {"max_queue_seconds": 60.0} | config  # how fast this machine is decides in no test who is refused
    model = served(engine, codec, compile_grammar=compile_grammar, chat=chat)
    settings = ServerConfig(**settings)
    engine.config = settings.engine().model_copy(update={"max_batch_size": engine.config.max_batch_size})
    if apart or start_forks is not ForkServer:
        host = RemoteEngine(settings, start_forks=start_forks)
    else:
        host = InProcess(load or (lambda _config, _progress: model), settings)
    app = App(settings, host, tracing=tracing_with)
    running = asyncio.create_task(app.run())
    await until(lambda: running.done() or (app.lifecycle.state is State.READY if ready else app.http_port))
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{app.grpc_port}", options=options) as channel:
            yield SimpleNamespace(
                app=app,
                engine=engine,
                running=running,
                channel=channel,
                inference=generation_pb2_grpc.InferenceServiceStub(channel),
                control=control_pb2_grpc.ControlServiceStub(channel),
            )
    finally:
        engine.gate.set()
        app.stop()
        async with asyncio.timeout(20):
            await running
        app.driver = None  # FastAPI keeps routes for ever in a cache, and with them the App: its engine takes half a GB


def serving_embedded(**options):
    """`serving` with the embedded pair loaded; `options` are those of `serving` and of `ServerConfig`."""
    return serving(**{"load": load_models} | EMBEDDED | options)


def http_client(server):
    """Nobody speaks TLS: reading the authorities would take most of a test's time."""
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.app.http_port}", timeout=60, verify=False)


def grpc_client(server, **options):
    return AsyncClient(f"127.0.0.1:{server.app.grpc_port}", **options)
