"""Whatever an adapter makes of rows of noise, the tokens are those of plain decoding.

The noise is written into the target's own arena: a row of it that anything reads as text would change a token here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, PreTrainedModel

from engine.config import EngineConfig
from engine.engine import Engine
from engine.model.fusion.fuse import fuse
from engine.model.fusion.stack import stack
from engine.model.quantize import quantise
from engine.model.runner import kv_layout
from engine.native import library
from engine.params import SamplingParams, SpeculationMode, SpeculationParams, Verification
from engine.startup.build import assemble
from engine.types import Request
from tests import adapters, fakes, laws, zoo

LAWS = (
    SamplingParams(max_tokens=20),
    SamplingParams(temperature=0.8, top_p=0.9, seed=11, max_tokens=20),
    SamplingParams(temperature=1.3, seed=2**64 - 1, max_tokens=20),
    SamplingParams(temperature=0.9, seed=5, max_tokens=20, repetition_penalty=1.3, presence_penalty=0.5, min_tokens=18),
    SamplingParams(max_tokens=20, frequency_penalty=0.7, logit_bias={5: 2.0, 9: -100.0}, banned_token_ids=(11, 12)),
)
NAMES = (None, "qv", "all", None, "head", None, "down")  # adapters of the requests, in turn
PLAIN = SpeculationParams(mode=SpeculationMode.OFF)


@cache
def reference() -> PreTrainedModel:
    """Wide enough for all that our C runs, so that verification runs its layers in one call and drafting does not."""
    widths = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    shape = {"vocab_size": zoo.VOCAB, "num_hidden_layers": 3, "max_position_embeddings": 128, "eos_token_id": zoo.END}
    return zoo.with_large_weights(LlamaConfig(**shape, **widths))


def _int8(model: PreTrainedModel) -> PreTrainedModel:
    quantise(model)
    fuse(model)
    stack(model)
    return model


def _loose(model: PreTrainedModel) -> PreTrainedModel:
    """torch's own matmuls, joined: nothing is packed."""
    fuse(model)
    return model


ATTENTION = (*(["native"] if library() is not None else []), "sdpa", "rows", "reference")
KINDS: dict[str, Callable[[PreTrainedModel], PreTrainedModel]] = {
    "float32": zoo.as_served, "bfloat16": lambda m: zoo.as_served(m.to(torch.bfloat16)), "int8": _int8,
    "unpacked": _loose,
}  # fmt: skip


@cache
def made(kind: str) -> nn.Module:
    return KINDS[kind](zoo.ours(reference()))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Adapters for requests, and `uno`: small enough to be right now and then."""
    root = tmp_path_factory.mktemp("adapters")
    written = adapters.write_all(root, reference())
    kind, targets = (4, 0.5), adapters.ADAPTERS["all"][2]
    return written | {"uno": str(adapters.write(root / "uno", reference(), *kind, [*targets, "lm_head"]))}


def engine_of(folders: dict[str, str], kind: str = "float32", **config: Any) -> Engine:
    others = {name: folder for name, folder in folders.items() if name != "uno"}
    usual = {"target": "t", "uno": folders["uno"], "adapter": others, "max_batch_size": 16, "page_size": 4}
    return assemble(EngineConfig(**usual | {"num_draft_tokens": 8} | config), made(kind))


def requests(count: int = 10, **speculation: Any) -> list[Request]:
    """Each law in turn, with and without an adapter of its own; the K of the requests differ unless one is given."""
    prompts = zoo.prompts(count)
    prompts[0] = prompts[0][:1]
    fixed = {"proposer": "uno", "mode": SpeculationMode.FIXED} | speculation
    return [
        Request(
            request_id=str(i),
            token_ids=tuple(prompt),
            sampling=LAWS[i % len(LAWS)],
            adapter=NAMES[i % len(NAMES)],
            speculation=SpeculationParams(**{"num_draft_tokens": i % 9} | fixed),
        )
        for i, prompt in enumerate(prompts)
    ]


def alone(folders: dict[str, str], kind: str = "float32") -> dict[str, list[int]]:
    """Each request by itself, one token at a time, over a cache that keeps nothing."""
    return _alone(tuple(sorted(folders.items())), kind)


@cache
def _alone(folders: tuple[tuple[str, str], ...], kind: str) -> dict[str, list[int]]:
    return one_by_one(engine_of(dict(folders), kind, prefix_cache=False), requests())


def one_by_one(engine: Engine, asked: list[Request]) -> dict[str, list[int]]:
    """What plain decoding says, to each request by itself."""
    plain = [replace(r, speculation=PLAIN) for r in asked]
    return {r.request_id: fakes.run(engine, [r]).tokens[r.request_id] for r in plain}


def accepted(outputs: fakes.Outputs) -> int:
    """Drafts that were kept beyond the first of each round, which is right by construction."""
    return sum(sum(f.stats.accepted_per_position[1:]) for f in outputs.finished.values())


CONFIGS = {
    "whole": {},
    "chunked": {"max_batch_tokens": 17},
    "bare": {"prefix_cache": False},
    "one page": {"page_size": 32},
}


@pytest.mark.slow
@pytest.mark.parametrize("how", CONFIGS)
def test_any_k(folders: dict[str, str], how: str) -> None:
    """Each K from 0 to 8 in one batch, then each for all; from the second round on prompts are in the prefix cache."""
    engine, kept = engine_of(folders, **CONFIGS[how]), 0
    for num_draft in (None, 0, 1, 4, 8):
        fixed = {} if num_draft is None else {"num_draft_tokens": num_draft}
        outputs = fakes.run(engine, requests(**fixed))
        assert outputs.tokens == alone(folders), f"K={num_draft}"
        kept += accepted(outputs)
        one = requests(**fixed)[7:8]
        assert fakes.run(engine, one).tokens["7"] == alone(folders)["7"], "alone"
    assert kept, "no row of noise was ever right"


@pytest.mark.slow
@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("kind", ["float32", "unpacked"])
def test_every_attention(folders: dict[str, str], kind: str, attention: str) -> None:
    """The two parts of a sequence are two entries of a ragged batch, over the same pages."""
    engine = engine_of(folders, kind, attention=attention)
    for _ in range(2):
        assert fakes.run(engine, requests()).tokens == alone(folders)


@pytest.mark.slow
@pytest.mark.parametrize("other", ["", "kv_cache_dtype", "attention"])
@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_kinds_of_weights(folders: dict[str, str], kind: str, other: str) -> None:
    config = {other: {"kv_cache_dtype": "int8", "attention": "rows"}[other]} if other else {}
    want = one_by_one(engine_of(folders, kind, prefix_cache=False, **config), requests())
    assert fakes.run(engine_of(folders, kind, **config), requests()).tokens == want


@pytest.mark.slow
def test_reproducible(folders: dict[str, str]) -> None:
    """Passes of one shape: the noise of a sequence may lie in another pass than its newest token, and after it."""
    engine = engine_of(folders, "unpacked", reproducible=True)
    want = fakes.run(engine, [replace(r, speculation=PLAIN) for r in requests()]).tokens
    assert fakes.run(engine, requests()).tokens == fakes.run(engine, requests(num_draft_tokens=8)).tokens == want


def test_preempted(folders: dict[str, str]) -> None:
    """Pages for a few of ten sequences; what is fed again reads nothing of the noise that was there."""
    per_token = kv_layout(reference().config, torch.float32).bytes_per_token
    engine = engine_of(folders, kv_memory=(32 * 4 * per_token + 1) / 2**30)
    assert engine.total_pages == 32
    outputs = fakes.run(engine, requests(num_draft_tokens=5))
    assert outputs.preempted
    assert outputs.tokens == alone(folders)


@pytest.mark.slow
def test_the_prefix_cache_holds_no_noise(folders: dict[str, str]) -> None:
    """Outputs that were drafted with noise become prompts, whose pages come from the cache."""
    engine = engine_of(folders, page_size=2)
    first = fakes.run(engine, requests(num_draft_tokens=8)).tokens
    longer = [replace(r, token_ids=(*r.token_ids, *first[r.request_id])) for r in requests(num_draft_tokens=6)]
    outputs = fakes.run(engine, longer)
    assert outputs.tokens == one_by_one(engine_of(folders, prefix_cache=False), longer)
    for request in longer:
        cached = outputs.finished[request.request_id].cached_prompt_tokens
        assert cached >= len(request.token_ids) - 3, "all but the last page"


@pytest.mark.parametrize("proposers", [("uno", "none"), ("uno", "ngram", "self", "uno")], ids=["none", "others"])
def test_beside_other_proposers(folders: dict[str, str], proposers: tuple[str, ...]) -> None:
    engine = engine_of(folders, self_layers=1)
    asked = [
        replace(r, speculation=replace(r.speculation, proposer=proposers[i % len(proposers)]))
        for i, r in enumerate(requests(num_draft_tokens=4))
    ]
    assert fakes.run(engine, asked).tokens == alone(folders)


@pytest.mark.slow
def test_k_that_control_chooses(folders: dict[str, str]) -> None:
    engine = engine_of(folders)
    for _ in range(3):
        assert fakes.run(engine, requests(mode=SpeculationMode.AUTO, num_draft_tokens=8)).tokens == alone(folders)


def test_greedy_under_the_rejection_rule(folders: dict[str, str]) -> None:
    """At temperature 0 a law is certain, so rejection too must give plain decoding's tokens."""
    greedy = [r for r in requests(verification=Verification.REJECTION) if not r.sampling.temperature]
    outputs = fakes.run(engine_of(folders), greedy).tokens
    assert outputs == {r.request_id: alone(folders)[r.request_id] for r in greedy}


@pytest.mark.slow
def test_a_sampled_request_can_be_repeated_under_the_rejection_rule(folders: dict[str, str]) -> None:
    """There the drafts decide, too: the noise must not hang on the batch."""
    asked = requests(verification=Verification.REJECTION)
    together = fakes.run(engine_of(folders), asked).tokens
    by_itself = engine_of(folders, prefix_cache=False)
    for request in asked[1:6]:
        assert fakes.run(by_itself, [request]).tokens[request.request_id] == together[request.request_id]


@pytest.mark.slow
def test_the_law_under_the_rejection_rule(folders: dict[str, str]) -> None:
    """1,500 seeds, the 4 likeliest tokens each: the law of the third token, which a row of noise drafted."""
    law = SamplingParams(temperature=3.0, top_k=4, max_tokens=4, ignore_eos=True)
    asked = SpeculationParams(
        proposer="uno", verification=Verification.REJECTION, num_draft_tokens=2, mode=SpeculationMode.FIXED
    )
    prompt = tuple(zoo.prompts()[2])
    many = [
        Request(request_id=str(i), token_ids=prompt, sampling=replace(law, seed=i), speculation=asked)
        for i in range(1500)
    ]
    outputs = fakes.run(engine_of(folders, max_batch_size=64), many)
    per_position = [f.stats.accepted_per_position for f in outputs.finished.values()]
    assert all(kept[0] for kept in per_position), "the first draft has the law of the target"
    assert 15 < sum(kept[1] for kept in per_position) < 1485, "some are kept and some are not"
    want = laws.of_later(reference(), prompt, law, 2)
    laws.assert_drawn((tokens[2] for tokens in outputs.tokens.values()), want)


@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name in zoo.families() if name != "distilgpt2"])
def test_every_family(tmp_path: Path, family: str) -> None:
    """Windows, tables of two lengths, learned positions, tied and untied outputs, mixtures."""
    model = zoo.reference(family)
    linear = {name.rpartition(".")[2] for name, m in model.named_modules() if type(m).__name__ in ("Linear", "Conv1D")}
    targets = sorted(linear - {"lm_head", "gate", "embed_out"})
    extra = {"fan_in_fan_out": True} if "gpt2" in family else {}
    folder = adapters.write(tmp_path / "uno", model, 3, 0.5, targets, **extra)
    engine = assemble(
        EngineConfig(target=family, uno=str(folder), page_size=4, max_batch_size=16), zoo.as_served(zoo.ours(model))
    )
    plain = assemble(EngineConfig(target=family, proposer="none"), zoo.ours(model))
    asked = [replace(r, adapter=None) for r in requests()]
    want = one_by_one(plain, asked)
    assert fakes.run(engine, asked).tokens == want
    assert fakes.run(engine, asked).tokens == want, "over cached pages"
