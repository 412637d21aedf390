"""Families through a real gRPC server: concurrent streams of unequal prompts, greedy and sampled, with every way
to draft and 0 to 8 drafts, chunked, preempted and cached; the tokens are those of transformers.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from client import AsyncClient
from engine.types import KVCursor, Request
from server.model import ServedModel
from tests.covering import some
from tests.families import NEW_TOKENS, assert_expected, requests, save
from tests.serving import grpc_client, serving

LONGEST, PAGE, SEQUENCES = 80, 4, 8
FREE_PAGES = LONGEST // PAGE + 6  # of the pages for SEQUENCES that long


# What a server adds is the same for all: attention alone, latent keys and values, states, and one sequence at a time.
@pytest.mark.parametrize("family", some(["llama", "deepseek-v3", "qwen-3.5", "falcon"], ["llama"]))
async def test_concurrent_streams_equal_transformers(family: str, tmp_path: Path) -> None:
    saved = save(family, tmp_path)
    models = {"target": saved.target, "draft": saved.draft, "self_layers": saved.self_layers, "threads": 1}
    sizes = {"max_batch_tokens": 64, "max_batch_size": SEQUENCES, "max_model_len": LONGEST, "page_size": PAGE}
    async with serving(load=ServedModel.load, warm_up_seconds=0.0, **models, **sizes) as server:
        pages = server.app.driver.model.engine.pages
        assert pages.reserve(KVCursor(), PAGE * (pages.num_pages - FREE_PAGES))
        async with grpc_client(server) as client:
            asked = requests(saved, saved.proposers)
            done = await asyncio.gather(*(_tokens(client, r, saved.case(r.request_id).asked) for r in asked))
        preempted = server.app.metrics.registry.get_sample_value("pilotfish_preemptions_total")
    assert_expected(saved, {request.request_id: tokens for request, tokens in zip(asked, done, strict=True)})
    assert preempted


async def _tokens(client: AsyncClient, request: Request, law: dict[str, float]) -> list[int]:
    drafts, tokens = request.speculation, list[int]()
    how = {"speculation": drafts.mode, "num_draft_tokens": drafts.num_draft_tokens, "proposer": drafts.proposer}
    async for event in client.stream(request.token_ids, max_tokens=NEW_TOKENS, **law, **how):
        tokens += getattr(event, "token_ids", ())
    return tokens
