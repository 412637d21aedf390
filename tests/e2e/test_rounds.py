"""The server over rounds on the device: streams, ends from all sides, and numbers, with the tokens of plain steps."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from client import AsyncClient
from tests.e2e.test_streams import Case, cases, sample
from tests.serving import serving_embedded, until

pytestmark = pytest.mark.slow
SETTINGS = {
    "dtype": "float32",  # as rounds take on a CPU; plain steps would take bfloat16 where our C multiplies it
    "max_model_len": 192,
    "max_batch_tokens": 64,
    "max_batch_size": 8,
}


def wanted(app) -> list[Case]:
    """Greedy and sampled, with logprobs, penalties and stop strings here and there, and prompts in chunks."""
    found = cases(16, app, longest_output=24)
    for i, case in enumerate(found):
        case.prompt = case.prompt[: 20 + 6 * i]
        case.options |= ({}, {}, {"stop": ["e"]}, {"logprobs": True}, {"frequency_penalty": 0.5})[i % 5]
        case.options |= {"seed": i}
    return found


async def said_by(loop: str) -> list[Case]:
    async with serving_embedded(loop=loop, speculation="fixed", **SETTINGS) as server:
        app, engine = server.app, server.app.driver.model.engine
        assert engine.loop == loop
        async with AsyncClient(f"127.0.0.1:{app.grpc_port}") as client:
            together = wanted(app)
            await asyncio.gather(*(case.run(client) for case in together))
        await until(lambda: engine.free_pages == engine.total_pages)
        engine.check_invariants()
        generated = sum(case.finished.usage.completion_tokens for case in together)
        assert sample(app, "pilotfish_generated_tokens_total") >= generated
        round_results = sample(app, "pilotfish_step_duration_seconds_sum", phase="launch")
        assert (round_results > 0.01) is (loop == "rounds")
        return together


@pytest.mark.timeout(300)
async def test_streams_are_those_of_plain_steps() -> None:
    rounds, plain = await said_by("rounds"), await said_by("plain")
    for got, want in zip(rounds, plain, strict=True):
        assert (got.tokens, got.text) == (want.tokens, want.text)
        assert got.finished.finish_reason == want.finished.finish_reason
        assert got.finished.usage == want.finished.usage
    assert sum(case.finished.speculation_stats.accepted for case in rounds) > 0


@pytest.mark.timeout(300)
async def test_ends_from_all_sides() -> None:
    """A caller that goes away, a deadline, an operator: pages are back, and the neighbours say what they would have."""
    async with serving_embedded(loop="rounds", **SETTINGS) as server:
        app, engine = server.app, server.app.driver.model.engine
        async with AsyncClient(f"127.0.0.1:{app.grpc_port}") as client:
            alone = [Case((5, 6, 7 + i), {"max_tokens": 60, "ignore_eos": True}) for i in range(3)]
            for case in alone:
                await case.run(client)
            beside = [Case(case.prompt, case.options) for case in alone]
            victims = [Case((9, 8, i), {"max_tokens": 180, "ignore_eos": True}) for i in range(4)]
            victims[0].options |= {"deadline": 1.0}
            neighbours = [asyncio.ensure_future(case.run(client)) for case in beside]
            running = [asyncio.ensure_future(case.run(client)) for case in victims]
            for case in victims[1:]:
                await until(lambda case=case: len(case.tokens) > 2 or case.finished, 60)
            for task in running[1:]:
                task.cancel()
            await asyncio.gather(*neighbours)
            with contextlib.suppress(Exception):
                await asyncio.gather(*running, return_exceptions=True)
            await until(lambda: not app.driver.live(), 30)
        assert [case.tokens for case in beside] == [case.tokens for case in alone]
        assert not engine.rounds.on_device
        assert engine.free_pages == engine.total_pages
        engine.check_invariants()
