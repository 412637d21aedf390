"""The whole path on the embedded pair: many streams over a real gRPC connection, some of them cut short."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from client import AsyncClient, Delta
from client.results import Finished
from models import corpus
from server.app import App
from tests.serving import serving_embedded, until

SETTINGS = {
    "max_model_len": 608,
    "drain_seconds": 30.0,
}


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


def cases(count: int, app: App, longest_output: int = 100, seed: int = 0) -> list[Case]:
    """Prompts of 1 to 400 tokens cut out of held-out code, outputs of 1 to `longest_output`, greedy and sampled."""
    rng = random.Random(seed)
    text = "".join(corpus.held_out_prompts(60))
    ids = app.driver.model.codec.encode(text)
    found = []
    for i in range(count):
        length = (1, 400)[i] if i < 2 else rng.randint(1, 400)
        start = rng.randrange(len(ids) - length)
        output = (longest_output, 1)[i] if i < 2 else rng.randint(1, longest_output)
        sampled = {"temperature": 0.8, "top_p": 0.95, "seed": i} if i % 2 else {}
        found.append(Case(tuple(ids[start : start + length]), {"max_tokens": output, **sampled}))
    return found


async def one_by_one(client: AsyncClient, wanted: Sequence[Case]) -> list[Case]:
    """The same requests, each with the server to itself."""
    alone = [Case(case.prompt, case.options) for case in wanted]
    for case in alone:
        await case.run(client)
    return alone


def sample(app: App, name: str, **labels: str) -> float:
    value = app.metrics.registry.get_sample_value(name, labels)
    assert value is not None, f"no metric {name} {labels}"
    return value


@pytest.mark.timeout(600)
async def test_64_streams_each_equal_to_its_own_single_run() -> None:
    async with serving_embedded(**SETTINGS) as server:
        app, engine = server.app, server.app.driver.model.engine
        async with AsyncClient(f"127.0.0.1:{app.grpc_port}") as client:
            together = cases(64, app, longest_output=24)
            await asyncio.gather(*(case.run(client) for case in together))
            assert all(case.finished is not None for case in together)
            await until(lambda: engine.free_pages == engine.total_pages)
            engine.check_invariants()
            large = sample(app, "pilotfish_batch_size_count", kind="verify") - sample(
                app, "pilotfish_batch_size_bucket", kind="verify", le="16.0"
            )
            assert large > 0, "no batch above 16"

            alone = await one_by_one(client, together)
            for got, want in zip(together, alone, strict=True):
                assert got.tokens == want.tokens
                assert got.text == want.text
                assert got.finished.finish_reason == want.finished.finish_reason
                assert got.finished.usage.prompt_tokens == want.finished.usage.prompt_tokens
                assert got.finished.usage.completion_tokens == want.finished.usage.completion_tokens
                assert len(got.tokens) == got.finished.usage.completion_tokens
            assert sum(case.finished.speculation_stats.accepted for case in together) > 0


@pytest.mark.slow  # test_phases cancels in every phase
@pytest.mark.timeout(600)
async def test_cancelling_half_of_100_streams_frees_their_pages_and_leaves_the_rest_alone() -> None:
    async with serving_embedded(**SETTINGS | {"max_batch_size": 100, "max_model_len": 1024}) as server:
        app, driver = server.app, server.app.driver
        engine = driver.model.engine
        watch = Watch(driver)
        async with AsyncClient(f"127.0.0.1:{app.grpc_port}") as client:
            everyone = cases(100, app, longest_output=60, seed=1)
            for case in everyone[:50]:
                case.options |= {"max_tokens": 600, "ignore_eos": True}  # far from its end on any machine
            rng = random.Random(2)
            running = [asyncio.create_task(case.run(client)) for case in everyone]

            async def hang_up(case: Case, task: asyncio.Task[None], after: float) -> None:
                await until(lambda: case.tokens, 120)
                await asyncio.sleep(after)
                task.cancel()

            victims = zip(everyone[:50], running, strict=False)
            await asyncio.gather(*(hang_up(case, task, rng.uniform(0, 0.02)) for case, task in victims))
            results = await asyncio.gather(*running, return_exceptions=True)
            cancelled = [case for case in everyone if case.finished is None]
            assert cancelled == everyone[:50]
            assert [isinstance(result, asyncio.CancelledError) for result in results] == [True] * 50 + [False] * 50
            await until(lambda: engine.free_pages == engine.total_pages)
            engine.check_invariants()
            assert len(watch.steps_until_freed) == len(cancelled)
            assert max(watch.steps_until_freed) <= 1, "pages were held for more than one step"
            assert len(watch.pages_freed) == len(cancelled)
            assert min(watch.pages_freed) >= 1, "the newest tokens' page is nobody else's"

            kept = [case for case in everyone if case.finished is not None]
            for got, want in zip(kept, await one_by_one(client, kept), strict=True):
                assert got.tokens == want.tokens


class Watch:
    """Counts the steps between a call's end and the return of its pages."""

    def __init__(self, driver: object) -> None:
        self.steps, self.steps_until_freed, self.pages_freed = 0, [], []
        self._asked: dict[str, int] = {}
        engine = driver.model.engine
        end, finish, step = driver.end, engine.finish, engine.step

        def watched_end(stream: object, *args: object) -> None:
            if not stream.ended:
                self._asked[stream.request_id] = self.steps
            end(stream, *args)

        def watched_finish(request_id: str, *args: object, **kwargs: object) -> object:
            before = engine.free_pages
            events = finish(request_id, *args, **kwargs)
            if events and request_id in self._asked:
                self.steps_until_freed.append(self.steps - self._asked[request_id])
                self.pages_freed.append(engine.free_pages - before)
            return events

        def watched_step() -> object:
            output = step()
            self.steps += 1
            return output

        driver.end, engine.finish, engine.step = watched_end, watched_finish, watched_step
