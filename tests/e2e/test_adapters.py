"""The embedded target with adapters, through the gRPC server: each request gets what its merged model generates."""

from __future__ import annotations

import asyncio
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from models import corpus, embedded_target
from tests import adapters
from tests.serving import grpc_client, serving_embedded

NEW_TOKENS = 24
KINDS = {"one": (4, 8.0, ["q_proj", "v_proj", "down_proj"]), "two": (8, 4.0, ["k_proj", "o_proj", "up_proj"])}
PROPOSERS = ("none", "ngram", "suffix", "model", "self")


def generated(model: PreTrainedModel, prompt: list[int]) -> tuple[int, ...]:
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW_TOKENS, pad_token_id=0
    )
    return tuple(out[0, len(prompt) :].tolist())


async def test_each_request_gets_what_its_merged_model_generates(tmp_path: Path) -> None:
    """One adapter is there from the start, the other is loaded by a call; all requests are in the engine at once."""
    model = AutoModelForCausalLM.from_pretrained(embedded_target(), dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(embedded_target())
    folders = {name: adapters.write(tmp_path / name, model, *kind) for name, kind in KINDS.items()}
    merged = {None: model} | {name: adapters.merged(model, folder) for name, folder in folders.items()}
    texts = zip(corpus.held_out_prompts(3), (300, 9, 70), strict=True)
    prompts = dict(zip(merged, (tokenizer.encode(text)[-n:] for text, n in texts), strict=True))
    want = {name: generated(one, prompts[name]) for name, one in merged.items()}
    assert len(set(want.values())) == 3
    options = {"adapter": {"one": str(folders["one"])}, "adapter_root": tmp_path, "dtype": "float32", "self_layers": 3}
    async with (
        serving_embedded(engine_process=True, max_batch_tokens=64, **options) as server,
        grpc_client(server) as to,
    ):
        await to.load_adapter("two", "two")
        asked = [(name, proposer) for name in prompts for proposer in PROPOSERS]
        fixed = {"max_tokens": NEW_TOKENS, "speculation": "fixed", "num_draft_tokens": 4}
        calls = [to.generate(prompts[name], adapter=name, proposer=proposer, **fixed) for name, proposer in asked]
        for (name, proposer), done in zip(asked, await asyncio.gather(*calls), strict=True):
            assert done.outputs[0].token_ids == want[name], (name, proposer)
