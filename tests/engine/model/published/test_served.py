"""Quantised checkpoints of others, from their folders: exact for the model that is served, whichever form it has.

Dequantised, tokens equal transformers' `generate` of the float model that the codes mean. With the codes on our integer
kernels, a sequence alone without drafts is the law.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from transformers import PreTrainedModel

from engine.attention import choose
from engine.config import EngineConfig
from engine.kv.arena import KVArena
from engine.kv.batch import Feed
from engine.model.runner import ModelRunner, kv_layout
from engine.params import SpeculationMode, SpeculationParams
from engine.startup.build import build_engine, load
from tests import fakes, published, zoo
from tests.covering import some
from tests.families import NEW_TOKENS, generate

CPU = torch.device("cpu")
# One of each kernel and reader: whole rows of int8, groups, zero points, an order of inputs, and floats of 8 bits.
SERVED = ("ct-int8", "ct-int4-zeros", "ct-fp8-rows", "gptq", "gptq-2", "gptq-8", "awq", "fp8-blocks")


@dataclass(frozen=True)
class Published:
    """A folder with a quantised target, one with a near draft, and the float model that the codes mean."""

    target: str
    draft: str
    floats: PreTrainedModel
    on_kernels: bool


@pytest.fixture(scope="module", params=some(SERVED, ("awq",)))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Published:
    folder = tmp_path_factory.mktemp(request.param)
    form = published.FORMATS[request.param]
    floats = published.publish(folder / "target", published.CONFIGS["qwen3"], form)
    zoo.near(floats).save_pretrained(folder / "draft")
    return Published(str(folder / "target"), str(folder / "draft"), floats, form.on_kernels)


def run(
    served: Published, batches: list[list[list[int]]], num_draft: int = 0, proposer: str = "none", **config: object
) -> tuple[list[list[int]], int]:
    """The tokens of batches of prompts that come one after another, and how many drafts were kept."""
    settings = {"target": served.target, "draft": served.draft, "threads": 1, "max_batch_size": 8, "dtype": "float32"}
    engine, said = build_engine(EngineConfig(**settings | config)), fakes.Outputs()
    mode = SpeculationMode.FIXED if num_draft else SpeculationMode.OFF
    wish = SpeculationParams(mode=mode, num_draft_tokens=num_draft, proposer=proposer)
    for i, prompts in enumerate(batches):
        asked = [fakes.request(p, name=f"{i}-{j}", wish=wish, max_tokens=NEW_TOKENS) for j, p in enumerate(prompts)]
        done = fakes.run(engine, asked)
        said.tokens |= done.tokens
        said.finished |= done.finished
    tokens = [said.tokens[f"{i}-{j}"] for i, prompts in enumerate(batches) for j in range(len(prompts))]
    return tokens, sum(ended.stats.accepted for ended in said.finished.values())


DRAFTS = (("none", 0, {}), ("ngram", 3, {"max_batch_tokens": 13}), ("model", 4, {"page_size": 8}))
# bfloat16 is where a row's place in a batch would show: its sums must have one order.
TYPES = (("float32", DRAFTS), ("bfloat16", DRAFTS[2:]))


def test_dequantised_equals_generate(served: Published) -> None:
    prompts = zoo.prompts(4)
    want = [generate(served.floats, prompt) for prompt in prompts]
    for proposer, num_draft, config in DRAFTS:
        tokens, accepted = run(served, [prompts], num_draft, proposer, weights="dequantised", **config)
        assert tokens == want, proposer
        assert proposer != "model" or accepted > 0


def test_with_its_own_codes_drafts_and_company_change_nothing(served: Published) -> None:
    prompts = zoo.prompts(4)
    for dtype, drafts in TYPES:
        alone, _ = run(served, [[prompt] for prompt in prompts], dtype=dtype, prefix_cache=False)
        for proposer, num_draft, config in drafts:
            tokens, accepted = run(served, [prompts], num_draft, proposer, dtype=dtype, **config)
            assert tokens == alone, (proposer, dtype)
            assert proposer != "model" or accepted > 0


def logits(served: Published, weights: str) -> torch.Tensor:
    """Of all positions of all prompts, `[rows, vocab]`."""
    model = load(EngineConfig(target=served.target, dtype="float32"), served.target, None, weights, CPU)
    runner = ModelRunner(model, KVArena(kv_layout(model.config, torch.float32), 8, 64, CPU), choose("rows", CPU))
    return runner.forward([Feed(p, 0, [i], len(p)) for i, p in enumerate(zoo.prompts(4))])


def test_logits_are_near_those_of_the_floats(served: Published) -> None:
    """Only activations are rounded, to 8 bits; these random weights are larger than any trained ones."""
    floats, codes = (logits(served, weights) for weights in ("dequantised", "native"))
    assert torch.equal(codes, floats) != served.on_kernels
    assert float((codes - floats).std() / floats.std()) < 0.05
    assert torch.nn.functional.cosine_similarity(codes, floats).min() > 0.99
