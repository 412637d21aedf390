"""Strangers on one server: what one of them sends must neither hold up nor change what another gets."""

from __future__ import annotations

import asyncio
import contextlib
import time
from functools import partial
from types import SimpleNamespace

import pytest

from client import AsyncClient, Delta, errors
from engine.params import Guided
from models import corpus
from tests.e2e.test_streams import sample
from tests.engine.text.test_guided import COSTLY_LATER, HOSTILE
from tests.serving import grpc_client, serving_embedded

SETTINGS = {"max_model_len": 608}
PATIENCE = 5.0  # seconds: how long a structure may compile, and longer than anyone's stream may stand still


def connected(server: SimpleNamespace) -> AsyncClient:
    return AsyncClient(f"127.0.0.1:{server.app.grpc_port}")


async def read(client: AsyncClient, **options: object) -> tuple[list[int], float]:
    """A stream's tokens, and the longest time that it stood still."""
    tokens, still, last = [], 0.0, None
    async with contextlib.aclosing(client.stream("def mean(values):\n", **options)) as events:
        async for event in events:
            now = time.monotonic()
            still, last = max(still, now - (last or now)), now
            if isinstance(event, Delta):
                tokens += event.token_ids
    return tokens, still


async def attack(client: AsyncClient, guided: Guided) -> errors.RequestFailedError | None:
    """What became of a request with this structure: None if it was answered."""
    asked = {name: getattr(guided, name) for name in ("json_schema", "regex", "grammar", "choice")}
    asked = {name: value for name, value in asked.items() if value is not None}
    try:
        await client.generate("x = ", deadline=60, max_tokens=200, temperature=1.0, seed=1, **asked)
    except (errors.InvalidRequestError, errors.ServerFaultError) as error:
        return error
    return None


# What gRPC's own encoding or the client refuses before a server sees it.
UNSENDABLE = {"surrogate", "nothing", "two"}


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_costly_structures_end_in_time_and_nobody_elses_stream_stalls() -> None:
    """The whole corpus of hostile structures at once: an answer, or an error that says what is wrong with it."""
    long = {"max_tokens": 400, "ignore_eos": True}
    refused = [guided for name, (guided, _) in HOSTILE.items() if name not in UNSENDABLE]
    async with serving_embedded(**SETTINGS) as server, grpc_client(server) as client:
        want, _ = await read(client, **long)
        neighbour = asyncio.create_task(read(client, **long))
        told = await asyncio.gather(*(attack(client, guided) for guided in refused + list(COSTLY_LATER.values())))
        got, still = await neighbour
        assert got == want
        assert still < PATIENCE
        at_once, later = told[: len(refused)], told[len(refused) :]
        assert all(isinstance(error, errors.InvalidRequestError) and "guided" in str(error) for error in at_once)
        assert any(later)
        assert all("the structure fails" in str(error) for error in later if error is not None)
        assert (await read(client, **long))[0] == want


async def test_tenants_share_pages_with_themselves_alone() -> None:
    """Two salts never meet in the prefix cache, one salt does; the output is the same whatever was found."""
    prompt = corpus.held_out_prompts(1)[0] * 2
    async with serving_embedded(**SETTINGS) as server:
        hits = partial(sample, server.app, "pilotfish_prefix_cache_hits_total")
        async with grpc_client(server) as client:
            seen, outputs = [], set()
            for salt in ("one", "two", None, "two", "one", None):
                before = hits()
                done = await client.generate(prompt, max_tokens=24, temperature=0.8, seed=3, cache_salt=salt)
                seen.append((hits() - before, done.outputs[0].finished.usage.cached_prompt_tokens))
                outputs.add(done.token_ids)
        assert len(outputs) == 1
        assert [found > 0 for found, _ in seen] == [False, False, False, True, True, True]
        assert all(found == cached for found, cached in seen)
        assert len({cached for _, cached in seen[3:]}) == 1
