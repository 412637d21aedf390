"""Floats whose matmuls are ours: equality is bitwise without being asked for, as in int8."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from engine import LLM, SamplingParams
from engine.attention import choose
from engine.kv.arena import KVArena
from engine.kv.batch import Feed
from engine.machine.threads import exactly
from engine.model.fusion.fuse import fuse
from engine.model.fusion.stack import stack
from engine.model.linear.packed import is_batch_invariant, pack
from engine.model.runner import ModelRunner, kv_layout
from engine.native import multiplies
from engine.params import SpeculationMode, SpeculationParams
from models import corpus, embedded_draft, embedded_target
from tests import zoo
from tests.covering import covering

pytestmark = pytest.mark.skipif(not multiplies(torch.float32), reason="needs a C compiler")
FAMILIES = sorted(zoo.families())
OFF = SpeculationParams(mode=SpeculationMode.OFF)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    with exactly(request.param):
        yield request.param


@pytest.mark.parametrize(("family", "dtype"), covering(FAMILIES, [torch.float32, torch.bfloat16], every=10))
def test_logits_are_bitwise_the_same_in_any_batch(family: str, dtype: torch.dtype, threads: int) -> None:
    model = zoo.ours(zoo.reference(family)).to(dtype)
    fuse(model)
    pack(model)
    stack(model)
    assert is_batch_invariant(model)
    arena = KVArena(kv_layout(model.config, dtype), 8, 64, torch.device("cpu"))
    runner = ModelRunner(model, arena, choose("auto", model.device, row_wise=True))
    draw = random.Random(family)
    texts = [[draw.randrange(3, zoo.VOCAB) for _ in range(draw.randrange(2, 60))] for _ in range(5)]
    alone = [torch.cat([runner.forward([Feed([token], i, [0])]) for i, token in enumerate(text)]) for text in texts]
    together = runner.forward([Feed(text, 0, [i], len(text)) for i, text in enumerate(texts)])
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_log_probabilities_are_the_same_bits(dtype: str) -> None:
    """Each prompt alone and undrafted, against all together, drafted for, in small pages and chunks."""
    prompts = [text[-n:] for text, n in zip(corpus.held_out_prompts(6), (500, 20, 300, 1, 77, 150), strict=True)]
    asked = SamplingParams(max_tokens=24, temperature=0.7, seed=3, ignore_eos=True, logprobs=2)
    alone = LLM(embedded_target(), dtype=dtype, prefix_cache=False, max_batch_size=1)
    want = [alone.generate(prompt, asked, speculation=OFF)[0] for prompt in prompts]
    small = {"max_batch_size": 8, "max_batch_tokens": 48, "page_size": 16, "num_draft_tokens": 5}
    got = LLM(embedded_target(), embedded_draft(), dtype=dtype, **small).generate(prompts, asked)
    assert [(done.token_ids, done.logprobs) for done in got] == [(done.token_ids, done.logprobs) for done in want]
    assert sum(done.stats.accepted for done in got)
