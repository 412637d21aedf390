"""A target with eight adapters, through the gRPC server: each request gets what its merged model gives, alone."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests import adapters, zoo
from tests.families import LAWS, MOST_DRAFTS, NEW_TOKENS, PROPOSERS, generate, sample, save
from tests.serving import grpc_client, serving


@pytest.mark.slow
async def test_each_request_gets_what_its_merged_model_gives(tmp_path: Path) -> None:
    """Half of the adapters are there from the start, the others are loaded by calls; all are in each batch.

    The same prompts come with each proposer, greedily and sampled by turns, so that later ones find cached pages.
    """
    saved, model = save("llama", tmp_path), zoo.reference("llama")
    folders = adapters.write_all(tmp_path / "adapters", model)
    names = (None, *folders)
    merged = {None: model} | {name: adapters.merged(model, Path(folder)) for name, folder in folders.items()}
    prompts = dict(zip(names, zoo.prompts(len(names)), strict=True))
    laws = {name: ({}, LAWS[i % len(LAWS)]) for i, name in enumerate(names)}
    want = {
        (name, turn): sample(merged[name], prompts[name], law) if law else generate(merged[name], prompts[name])
        for name in names
        for turn, law in enumerate(laws[name])
    }
    assert len(set(map(tuple, want.values()))) == len(want)
    known = list(folders)[:4]
    options = {"adapter": {name: folders[name] for name in known}, "adapter_root": tmp_path / "adapters"}
    models = {"target": saved.target, "draft": saved.draft, "self_layers": 1, "threads": 1}
    sizes = {"max_batch_size": 2 * len(names), "max_batch_tokens": 64, "page_size": 4, "warm_up_seconds": 0.0}
    async with serving(engine_process=True, **models, **sizes, **options) as server, grpc_client(server) as to:
        for name in folders.keys() - set(known):
            await to.load_adapter(name, name)
        asked = [(name, proposer) for proposer in PROPOSERS for name in names]
        calls = [
            to.generate(
                prompts[name], adapter=name, max_tokens=NEW_TOKENS, **laws[name][i % 2],
                proposer=proposer, speculation="fixed", num_draft_tokens=(i + i // len(names)) % (MOST_DRAFTS + 1),
            )
            for i, (name, proposer) in enumerate(asked)
        ]  # fmt: skip
        done = await asyncio.gather(*calls)
    for i, ((name, proposer), completion) in enumerate(zip(asked, done, strict=True)):
        assert list(completion.outputs[0].token_ids) == want[name, i % 2], (name, proposer)
