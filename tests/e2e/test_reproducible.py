"""One request through gRPC, wherever it finds itself: the same tokens always, and with `reproducible` the same bits."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
import torch

from pilotfish.client import AsyncClient, Completion
from pilotfish.client.errors import UnsupportedError
from pilotfish.engine.engine import Engine
from pilotfish.engine.model.checkpoint import read_config
from pilotfish.engine.model.fallback import kv_layout
from pilotfish.engine.stats import StepOutput, StepStats
from pilotfish.engine.types import Sequence
from pilotfish.models import corpus
from tests.serving import EMBEDDED, serving_embedded, until

# Of a fixed number of drafts: whether any pay beside 31 others is for AUTO to say, and another matter.
SAMPLED = {
    "temperature": 0.9, "top_p": 0.95, "seed": 7, "max_tokens": 24, "logprobs": True, "top_logprobs": 20,
    "speculation": "fixed",
}  # fmt: skip
PAGE_SIZE, FEW_PAGES = 4, 36


def starved() -> dict[str, object]:
    """Pages for three prompts of 40 tokens, and not for two outputs besides."""
    per_token = kv_layout(read_config(EMBEDDED["target"], None), torch.float32).bytes_per_token
    memory = (FEW_PAGES * PAGE_SIZE * per_token + 1) / 2**30
    return {"draft": None, "page_size": PAGE_SIZE, "kv_memory": memory, "max_model_len": 128, "prefix_cache": False}


class Held:
    """An engine whose first step waits until so many requests are there, and which notes who loses its pages."""

    def __init__(self, engine: Engine) -> None:
        self.preempted, self._engine, self._until = set(), engine, 0
        self._step, self._preempt = engine.step, engine.scheduler._preempt
        engine.step, engine.scheduler._preempt = self.step, self.preempt

    @property
    def num_requests(self) -> int:
        return self._engine.load.num_running + self._engine.load.num_waiting

    def hold(self, until: int) -> None:
        self._until = until

    def step(self) -> StepOutput:
        if self.num_requests < self._until:
            time.sleep(0.001)
            load = self._engine.load
            return StepOutput((), StepStats(running=load.num_running, waiting=load.num_waiting), load)
        self._until = 0
        return self._step()

    def preempt(self, sequence: Sequence) -> None:
        self.preempted.add(sequence.request_id)
        self._preempt(sequence)


@asynccontextmanager
async def running(**config: object):
    async with serving_embedded(dtype="float32", **{"max_model_len": 608, "drain_seconds": 30.0} | config) as server:
        model = server.app.driver.model
        async with AsyncClient(f"127.0.0.1:{server.app.grpc_port}") as client:
            yield SimpleNamespace(client=client, engine=Held(model.engine), codec=model.codec)


async def ask(server: SimpleNamespace, *, others: int = 0) -> Completion:
    """The watched request beside others that came before it and last longer; all prompts are of held-out code."""
    ids = server.codec.encode("".join(corpus.held_out_prompts(60)))
    mine, *strange = (ids[start : start + 40 - start % 19] for start in range(0, 32 * 50, 50))
    server.engine.hold(others + 1)
    async with asyncio.TaskGroup() as tasks:
        for i, prompt in enumerate(strange[:others]):
            options = {"temperature": 1.0 * (i % 2), "seed": i, "max_tokens": 40, "ignore_eos": True}
            tasks.create_task(server.client.generate(prompt, **options))
        await until(lambda: server.engine.num_requests == others)
        watched = tasks.create_task(server.client.generate(mine, request_id="mine", ignore_eos=True, **SAMPLED))
    return watched.result()


@pytest.mark.slow
@pytest.mark.parametrize("reproducible", [False, True])
async def test_alone_in_company_after_preemption_and_after_a_restart(reproducible: bool) -> None:
    found = {}
    async with running(reproducible=reproducible) as server:
        found["alone"] = alone = await ask(server)
        found["over its own cached prefix"] = await ask(server)
    async with running(reproducible=reproducible) as server:
        found["among 31 others after a restart"] = await ask(server, others=31)
    async with running(reproducible=reproducible, **starved()) as server:
        found["preempted"] = await ask(server, others=2)
        assert "mine" in server.engine.preempted
    cached = [how for how, got in found.items() if got.finished.usage.cached_prompt_tokens > 0]
    assert cached == ["over its own cached prefix"]
    assert found["among 31 others after a restart"].finished.speculation_stats.accepted > 0
    assert len(alone.token_ids) == len(alone.logprobs) == SAMPLED["max_tokens"]
    for how, got in found.items():
        assert got.token_ids == alone.token_ids, how
        if reproducible:
            assert got.logprobs == alone.logprobs, how
        else:
            assert [of.logprob for of in got.logprobs] == pytest.approx([of.logprob for of in alone.logprobs], abs=1e-4)


async def test_rejection_is_refused_by_a_reproducible_server() -> None:
    async with running(reproducible=True, draft=None) as server:
        with pytest.raises(
            UnsupportedError,
            match=r"speculation\.verification is 'rejection'; a reproducible server supports only coupled",
        ):
            await server.client.generate("x", verification="rejection")
