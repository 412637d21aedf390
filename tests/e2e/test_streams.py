"""The whole path on the embedded pair: many streams over a real gRPC connection, some of them cut short."""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import dataclass, field

import pytest

from pilotfish.client import AsyncClient, Delta
from pilotfish.client.results import Finished
from pilotfish.models import corpus
from pilotfish.server.app import App
from tests.server.test_life import metric
from tests.serving import grpc_client, serving_embedded, until

CUT_SHORT = 4
ROUNDS = {"loop": "rounds", "dtype": "float32"}  # the type that rounds on the device take on a CPU
LOOPS = [pytest.param(14, {}, id="plain"), pytest.param(10, ROUNDS, id="rounds", marks=pytest.mark.slow)]


@dataclass
class Case:
    """One request and what came of it."""

    prompt: tuple[int, ...]
    options: dict[str, object]
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finished: Finished | None = None

    async def run(self, client: AsyncClient) -> None:
        async with contextlib.aclosing(client.stream(self.prompt, **self.options)) as events:
            async for event in events:
                assert self.finished is None, "an event after the end"
                if isinstance(event, Delta):
                    self.tokens += event.token_ids
                    self.text += event.text
                else:
                    self.finished = event


def cases(count: int, app: App) -> list[Case]:
    """Prompts of 1 to 90 tokens of held-out code, outputs of 1 to 24; greedy and sampled, with and without options."""
    rng = random.Random(0)
    ids = app.driver.model.codec.encode("".join(corpus.held_out_prompts(20)))
    found = []
    for i in range(count):
        length = (1, 90)[i] if i < 2 else rng.randint(1, 60)
        start = rng.randrange(len(ids) - length)
        options = {"max_tokens": (24, 1)[i] if i < 2 else rng.randint(8, 24)}
        options |= {"temperature": 0.8, "top_p": 0.95, "seed": i} if i % 2 else {}
        options |= ({}, {}, {"stop": ["e"]}, {"logprobs": True}, {"frequency_penalty": 0.5})[i % 5]
        found.append(Case(tuple(ids[start : start + length]), options))
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("count", "loop"), LOOPS)
async def test_many_streams_are_each_equal_to_its_own_single_run_whoever_leaves(
    count: int, loop: dict[str, str]
) -> None:
    async with (
        serving_embedded(max_model_len=608, max_batch_tokens=128, **loop) as server,
        grpc_client(server) as client,
    ):
        app, engine = server.app, server.app.driver.model.engine
        together = cases(count, app)
        leaving = [Case((5, 6, 7 + i), {"max_tokens": 600, "ignore_eos": True}) for i in range(CUT_SHORT)]
        cut = [asyncio.create_task(case.run(client)) for case in leaving]
        running = asyncio.gather(*(case.run(client) for case in together))
        for case, task in zip(leaving, cut, strict=True):
            await until(lambda case=case: len(case.tokens) > 2)
            task.cancel()
        await running
        await until(lambda: engine.load.free_pages == engine.facts.total_pages)
        engine.check_invariants()
        assert all(
            isinstance(end, asyncio.CancelledError) for end in await asyncio.gather(*cut, return_exceptions=True)
        )
        assert {metric(server, "requests_total", finish_reason="cancelled")} == {CUT_SHORT}
        in_rounds = metric(server, "step_duration_seconds_sum", phase="launch") > 0.01
        assert in_rounds is ("loop" in loop)
        largest = [metric(server, "batch_size_bucket", kind="verify", le=size) for size in ("8.0", "+Inf")]
        assert in_rounds or largest[0] < largest[1], "no batch above 8"

        for got in together:
            want = Case(got.prompt, got.options)
            await want.run(client)
            assert (got.tokens, got.text) == (want.tokens, want.text)
            assert got.finished.finish_reason == want.finished.finish_reason
            assert got.finished.usage.prompt_tokens == want.finished.usage.prompt_tokens
            assert got.finished.usage.completion_tokens == want.finished.usage.completion_tokens == len(got.tokens)
        assert sum(case.finished.speculation_stats.accepted for case in together) > 0


async def test_tenants_share_pages_with_themselves_alone() -> None:
    """Two salts never meet in the prefix cache, one salt does; the output is the same whatever was found."""
    [prompt] = corpus.held_out_prompts(1)
    async with serving_embedded(max_model_len=608) as server, grpc_client(server) as client:
        seen, outputs = [], set()
        for salt in ("one", "two", None, "two", "one", None):
            before = metric(server, "prefix_cache_hits_total")
            done = await client.generate(prompt, max_tokens=4, temperature=0.8, seed=3, cache_salt=salt)
            found = metric(server, "prefix_cache_hits_total") - before
            seen.append((found, done.outputs[0].finished.usage.cached_prompt_tokens))
            outputs.add(done.token_ids)
    assert len(outputs) == 1
    assert [found > 0 for found, _ in seen] == [False, False, False, True, True, True]
    assert all(found == cached for found, cached in seen)
    assert len({cached for _, cached in seen[3:]}) == 1
