"""With drafts of an EAGLE-3 head the tokens are those of plain decoding, whatever the batch, the chunks and the law."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, PreTrainedModel

from engine.config import EngineConfig
from engine.engine import Engine
from engine.model.runner import kv_layout
from engine.params import SamplingParams, SpeculationParams, Verification
from engine.startup.build import assemble
from engine.types import Request
from tests import fakes, heads, laws, zoo

LAWS = (
    SamplingParams(max_tokens=24),
    SamplingParams(temperature=0.8, top_p=0.9, seed=11, max_tokens=24),
    SamplingParams(temperature=1.3, seed=0, max_tokens=24),
    SamplingParams(temperature=0.9, seed=5, max_tokens=24, repetition_penalty=1.3, presence_penalty=0.5, min_tokens=20),
    SamplingParams(max_tokens=24, frequency_penalty=0.7, logit_bias={5: 2.0, 9: -100.0}, banned_token_ids=(11, 12)),
)
IN_C = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
SIZES: dict[str, dict[str, object]] = {"torch": {}, "C": IN_C}
CHANGES: dict[str, dict[str, object]] = {
    "torch": {"draft_vocab_size": 60, "norm_output": True, "fc_norm": True},
    "C": {"draft_vocab_size": 80, **IN_C},
}


@lru_cache
def reference(where: str) -> PreTrainedModel:
    return zoo.with_large_weights(LlamaConfig(**zoo.COMMON | {"num_hidden_layers": 6} | SIZES[where]))


def target(where: str) -> PreTrainedModel:
    mine = zoo.ours(reference(where))
    return zoo.as_served(mine) if where == "C" else mine


def engine_of(folder: Path, where: str = "torch", **config: object) -> Engine:
    eagle = heads.eagle3(folder, CHANGES[where], target=reference(where).config.hidden_size)
    return assemble(EngineConfig(target="llama", eagle=eagle, **{"max_batch_size": 16, **config}), target(where))


def requests(count: int = 10, **speculation: object) -> list[Request]:
    prompts = zoo.prompts(count)
    prompts[0] = prompts[0][:1]
    return [
        Request(
            request_id=str(i),
            token_ids=tuple(prompt),
            sampling=LAWS[i % len(LAWS)],
            speculation=SpeculationParams(proposer="eagle", **speculation),
        )
        for i, prompt in enumerate(prompts)
    ]


@lru_cache
def plain(where: str) -> dict[str, list[int]]:
    """Each request by itself, one token at a time."""
    engine = assemble(EngineConfig(target="llama", proposer="none"), target(where))
    alone = [replace(r, speculation=SpeculationParams()) for r in requests()]
    return {r.request_id: fakes.run(engine, [r]).tokens[r.request_id] for r in alone}


@pytest.mark.parametrize("max_batch_tokens", [512, 17], ids=["whole", "chunked"])
@pytest.mark.parametrize("where", SIZES)
def test_any_k_in_one_batch(tmp_path: Path, where: str, max_batch_tokens: int) -> None:
    """K from 0 to 8 side by side, greedy and sampled; the second time behind cached prefixes."""
    engine = engine_of(tmp_path, where, num_draft_tokens=8, max_batch_tokens=max_batch_tokens, page_size=8)
    asked = [replace(r, speculation=replace(r.speculation, num_draft_tokens=i % 9)) for i, r in enumerate(requests())]
    for turn in range(2):
        outputs = fakes.run(engine, asked)
        assert outputs.tokens == plain(where), f"turn {turn}"
        assert sum(ended.stats.drafted for ended in outputs.finished.values()) > 50


def test_preempted(tmp_path: Path) -> None:
    """Pages for a few of ten sequences: features and K/V are given up and made again."""
    per_token = 7 * kv_layout(LlamaConfig(**zoo.COMMON | {"num_hidden_layers": 1}), torch.float32).bytes_per_token
    memory = 20 * 8 * per_token / 2**30
    engine = engine_of(tmp_path, page_size=8, attention="reference", kv_memory=memory, proposer="eagle")
    assert engine.total_pages == 20
    outputs = fakes.run(engine, requests())
    assert outputs.preempted
    assert outputs.tokens == plain("torch")


def test_greedy_under_the_rejection_rule(tmp_path: Path) -> None:
    greedy = [r for r in requests(verification=Verification.REJECTION) if not r.sampling.temperature]
    outputs = fakes.run(engine_of(tmp_path), greedy).tokens
    assert outputs == {r.request_id: plain("torch")[r.request_id] for r in greedy}


def test_the_law_under_the_rejection_rule(tmp_path: Path) -> None:
    """1,500 seeds, the 16 likeliest tokens each: the law of the second token, which was drafted, over all firsts."""
    law = SamplingParams(temperature=3.0, top_k=16, max_tokens=3, ignore_eos=True)
    asked = SpeculationParams(proposer="eagle", verification=Verification.REJECTION, num_draft_tokens=1)
    prompt = tuple(zoo.prompts()[2])
    many = [
        Request(request_id=str(i), token_ids=prompt, sampling=replace(law, seed=i), speculation=asked)
        for i in range(1500)
    ]
    outputs = fakes.run(engine_of(tmp_path, max_batch_size=64), many)
    rounds = [f.stats for f in outputs.finished.values() if f.stats.drafted]
    assert len(rounds) == 1500
    assert 15 < sum(s.accepted for s in rounds) < 1485, "some are kept and some are not"
    want = laws.of_later(reference("torch"), prompt, law, 1)
    laws.assert_drawn((tokens[1] for tokens in outputs.tokens.values()), want)
