"""Every family through a real gRPC server: concurrent streams of unequal prompts, tokens equal to `generate`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from client import AsyncClient
from server.model import ServedModel
from tests import zoo
from tests.families import NEW_TOKENS, save
from tests.serving import serving


@pytest.mark.parametrize("family", zoo.every_family())
async def test_concurrent_streams_equal_generate(family: str, tmp_path: Path) -> None:
    saved = save(family, tmp_path)
    settings = {"target": saved.target, "draft": saved.draft, "threads": 1, "max_batch_tokens": 64}
    async with (
        serving(load=ServedModel.load, **settings) as server,
        AsyncClient(f"127.0.0.1:{server.app.grpc_port}") as client,
    ):
        streams = [_tokens(client, prompt) for prompt in saved.prompts * 2]
        assert await asyncio.gather(*streams) == saved.expected * 2


async def _tokens(client: AsyncClient, prompt: list[int]) -> list[int]:
    tokens: list[int] = []
    async for event in client.stream(tuple(prompt), max_tokens=NEW_TOKENS):
        tokens += getattr(event, "token_ids", ())
    return tokens
