"""Where our C multiplies equality is bitwise without being asked for, in int8 as in floats: every row of logits has the
same bits in any company, and so have log-probabilities.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from pilotfish.engine import LLM, SamplingParams
from pilotfish.engine.attention import choose
from pilotfish.engine.kv.arena import KVArena
from pilotfish.engine.kv.batch import Feed
from pilotfish.engine.machine.threads import exactly
from pilotfish.engine.model.decoder.decoder import is_batch_invariant
from pilotfish.engine.model.decoder.load import load_decoder
from pilotfish.engine.model.runner import ModelRunner, layout_of_model
from pilotfish.engine.native import multiplies
from pilotfish.engine.params import SpeculationMode, SpeculationParams
from pilotfish.engine.startup import build
from pilotfish.models import corpus, embedded_draft, embedded_eagle, embedded_medusa, embedded_target
from tests import zoo

OFF = SpeculationParams(mode=SpeculationMode.OFF)


def int8(model: PreTrainedModel) -> nn.Module:
    return zoo.as_served(model, "int8")


def packed(model: PreTrainedModel) -> nn.Module:
    made = zoo.as_served(model)
    assert is_batch_invariant(made)
    return made


needs_c = pytest.mark.skipif(not multiplies(torch.float32), reason="needs a C compiler")
DTYPES = (torch.float32, torch.bfloat16)
FEW = ("llama", "gpt2")  # rotary and learned positions


@pytest.mark.parametrize("prepare", [int8, pytest.param(packed, marks=needs_c)])
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        pytest.param(name, DTYPES[i % 2], marks=[] if name in FEW else pytest.mark.slow)
        for i, name in enumerate(zoo.FAMILIES)
    ],
)
def test_logits_are_bitwise_the_same_in_any_batch(
    family: str, prepare: Callable[[PreTrainedModel], nn.Module], dtype: torch.dtype
) -> None:
    """One token at a time, all at once, and the last alone; on one thread or two."""
    model = zoo.ours(zoo.reference(family), dtype)
    model = prepare(model)
    arena = KVArena(layout_of_model(model), 8, 64, torch.device("cpu"))
    runner = ModelRunner(model, arena, choose("rows" if prepare is int8 else "auto", model.device, row_wise=True))
    draw = random.Random(family)
    texts = [[draw.randrange(3, zoo.VOCAB) for _ in range(draw.randrange(2, 40))] for _ in range(4)]
    with exactly(2 if family == "llama" else 1):
        alone = [torch.cat([runner.forward([Feed([token], i, [0])]) for i, token in enumerate(text)]) for text in texts]
        together = runner.forward([Feed(text, 0, [i], len(text)) for i, text in enumerate(texts)])
        runner.forward([Feed(text[:-1], 0, [i], 0) for i, text in enumerate(texts)])
        last = runner.forward([Feed(text[-1:], len(text) - 1, [i]) for i, text in enumerate(texts)])
    assert torch.equal(together, torch.cat(alone))
    assert torch.equal(last, torch.stack([rows[-1] for rows in alone]))


INT8 = {"weights": "int8"}
KINDS = {
    "int8": INT8,
    "int8 and rows": INT8 | {"attention": "rows", "dtype": "bfloat16", "draft_weights": "native"},
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "float32, reproducible": {"reproducible": True, "dtype": "float32"},
    "int8 keys": {"dtype": "float32", "kv_cache_dtype": "int8"},
    "int8 keys, reproducible": {"kv_cache_dtype": "int8", "reproducible": True, "dtype": "bfloat16"},
}


@pytest.mark.parametrize(
    "kind", [pytest.param(name, marks=[] if name == "int8" else pytest.mark.slow) for name in KINDS]
)
def test_log_probabilities_are_the_same_bits(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every kind of draft and company, chunked and over cached pages, as alone and undrafted."""
    if "reproducible" in kind:  # torch multiplies, in passes of one shape
        unpacked = lambda *given, **options: load_decoder(*given, **options | {"packs": False})  # noqa: E731
        monkeypatch.setattr(build, "load_decoder", unpacked)
    if not KINDS[kind].keys() & {"weights", "reproducible"} and not multiplies(torch.float32):
        pytest.skip("needs a C compiler")
    prompts = [text[-n:] for text, n in zip(corpus.held_out_prompts(4), (90, 20, 1, 60), strict=True)]
    drafts = [embedded_draft(), embedded_medusa(), embedded_eagle(), "self:3"]
    sizes = {"threads": 1, "max_model_len": 256, "max_batch_size": 8, "max_batch_tokens": 48, "page_size": 8}
    llm = LLM(embedded_target(), drafts, **sizes, **KINDS[kind])
    asked = SamplingParams(max_tokens=8, temperature=0.7, seed=3, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    pairs = enumerate(prompts)
    alone = [llm.generate(prompt, asked, speculation=OFF, cache_salt=str(i))[0] for i, prompt in pairs]
    want = [(done.token_ids, done.logprobs, done.prompt_logprobs) for done in alone]
    for proposer in ("model", "none") if "reproducible" in kind else ("model", "eagle", "medusa", "self", "none"):
        fixed = SpeculationParams(mode=SpeculationMode.FIXED, num_draft_tokens=5, proposer=proposer)
        got = llm.generate(prompts, asked, speculation=fixed)
        assert [(done.token_ids, done.logprobs, done.prompt_logprobs) for done in got] == want, proposer
        assert proposer == "none" or sum(done.stats.accepted for done in got)
