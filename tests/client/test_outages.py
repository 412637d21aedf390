"""Two servers behind one client, restarted in turn under load: no stream is lost, and where they drain, none is cut."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

import client
from tests.server.fake_engine import FakeEngine
from tests.serving import serving, until

TOKENS = 48
KINDS = {
    "plain": {},
    "three outputs": {"n": 3},
    "a stop string": {"stop": ["lazy dog"]},
    "log-probabilities": {"logprobs": True, "prompt_logprobs": True, "top_logprobs": 2},
}


def joined(events):
    """What a caller has of each output, however it was cut into events."""
    found = {}
    for event in events:
        tokens, text, logprobs, prompt, end = found.get(event.index, ((), "", (), None, None))
        assert end is None, "an event after the end"
        if isinstance(event, client.Finished):
            end = (event.finish_reason, event.stop_string, event.usage.completion_tokens)
        else:
            assert event.prompt_logprobs is None or not tokens, "sent twice"
            tokens, text, prompt = tokens + event.token_ids, text + event.text, event.prompt_logprobs or prompt
            logprobs += event.logprobs
        found[event.index] = tokens, text, logprobs, prompt, end
    return found


@pytest.mark.parametrize("drain_seconds", [0.0, 60.0])
async def test_streams_outlive_a_restart_of_every_server(drain_seconds):
    async with AsyncExitStack() as stack:

        async def server(port=0):
            engine = FakeEngine(step_seconds=0.004)
            return await stack.enter_async_context(serving(engine, grpc_port=port, drain_seconds=drain_seconds))

        servers = [await server(), await server()]
        addresses = [f"127.0.0.1:{server.app.grpc_port}" for server in servers]
        connection = await stack.enter_async_context(client.AsyncClient(addresses))

        async def read(kind):
            return [e async for e in connection.stream("ab", max_tokens=TOKENS, seed=3, deadline=60, **KINDS[kind])]

        wanted = {kind: joined(await read(kind)) for kind in KINDS}
        done, interruptions, stopping = [], [], asyncio.Event()

        async def work(kind):
            while not stopping.is_set():
                events = await read(kind)
                assert joined(events) == wanted[kind]
                interruptions.append(max(e.interruptions for e in events if isinstance(e, client.Finished)))
                done.append(kind)

        async with asyncio.TaskGroup() as workers:
            for kind in KINDS:
                workers.create_task(work(kind))
            for place in (0, 1):
                await until(lambda place=place: servers[place].engine.num_running, 30)
                before = len(done)
                servers[place].app.stop()
                assert await servers[place].running == 0
                servers[place] = await server(servers[place].app.grpc_port)
                await until(lambda before=before: len(done) >= before + len(KINDS), 30)
            stopping.set()
        assert (max(interruptions) >= 1) == (drain_seconds == 0.0)
