"""Two servers behind one client, restarted in turn under load: no stream is cut and no request is lost."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import client
from client import Retry
from tests.server.fake_engine import FakeEngine
from tests.serving import serving, until

WORKERS, TOKENS = 6, 60


async def test_a_rolling_restart_loses_nothing():
    async with AsyncExitStack() as stack:
        engines = [FakeEngine(step_seconds=0.003) for _ in range(2)]
        servers = [await stack.enter_async_context(serving(engine)) for engine in engines]
        addresses = [f"127.0.0.1:{server.app.grpc_port}" for server in servers]
        connection = await stack.enter_async_context(client.AsyncClient(addresses, retry=Retry(attempts=5)))
        wanted, done, stopping = engines[0].expected(TOKENS), [], asyncio.Event()

        async def work():
            while not stopping.is_set():
                events = [e async for e in connection.stream("ab", max_tokens=TOKENS, deadline=30)]
                tokens = [token for e in events if isinstance(e, client.Delta) for token in e.token_ids]
                done.append(tuple(tokens) == wanted and isinstance(events[-1], client.Finished))

        async def more(count):
            target = len(done) + count
            await until(lambda: len(done) >= target, 30)

        async with asyncio.TaskGroup() as workers:
            for _ in range(WORKERS):
                workers.create_task(work())
            await more(2 * WORKERS)
            assert all(engine.requests for engine in engines), "both take part"
            servers[0].app.stop()
            assert await servers[0].running == 0
            await more(2 * WORKERS)
            port = servers[0].app.grpc_port
            fresh = await stack.enter_async_context(serving(FakeEngine(step_seconds=0.003), grpc_port=port))
            await until(lambda: len(fresh.engine.requests) > 2, 30)
            servers[1].app.stop()
            assert await servers[1].running == 0
            await more(2 * WORKERS)
            stopping.set()
        assert all(done)
        assert fresh.engine.free_pages == fresh.engine.total_pages
