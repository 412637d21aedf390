"""A request with an adapter gets what the merged model alone generates, whatever drafts and whoever else there are.

Eight adapters of unequal ranks and targets, and the base model, share each batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, PreTrainedModel

from pilotfish.engine import LLM, InvalidRequest, SamplingParams
from pilotfish.engine.config import EngineConfig
from pilotfish.engine.llm import CompletionOutput
from pilotfish.engine.model.fallback import kv_layout
from pilotfish.engine.params import SpeculationMode, SpeculationParams
from pilotfish.engine.startup.build import assemble
from pilotfish.engine.types import Request
from tests import adapters, fakes, heads, zoo
from tests.adapters import ADAPTERS
from tests.covering import some
from tests.families import generate
from tests.sameness import run

NEW_TOKENS = 12
NAMES = (None, *ADAPTERS)  # None: the base model
GREEDY = SamplingParams(max_tokens=NEW_TOKENS, logprobs=2)
SAMPLED = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.9, top_p=0.95, seed=11, logprobs=2)
OFF = SpeculationParams(mode=SpeculationMode.OFF)


@cache
def reference() -> PreTrainedModel:
    """Wide enough for all that our C runs, so that its layers run in one call where no row has an adapter."""
    widths = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    shape = {"vocab_size": zoo.VOCAB, "num_hidden_layers": 3, "max_position_embeddings": 128, "eos_token_id": zoo.END}
    return zoo.with_large_weights(LlamaConfig(**shape, **widths))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return adapters.write_all(tmp_path_factory.mktemp("adapters"), reference())


def prompts() -> list[list[int]]:
    """One for each of `NAMES`, of unequal lengths."""
    return zoo.prompts(len(NAMES))


def _int8(model: PreTrainedModel) -> nn.Module:
    return zoo.as_served(model, "int8")


def _bfloat16(model: PreTrainedModel) -> nn.Module:
    return zoo.as_served(model.to(torch.bfloat16))


KINDS: dict[str, Callable[[PreTrainedModel], PreTrainedModel]] = {
    "float32": zoo.as_served, "bfloat16": _bfloat16, "int8": _int8, "int8-bfloat16": lambda m: _int8(m.bfloat16()),
    "unpacked": zoo.on_kernels,
}  # fmt: skip


@cache
def made(kind: str) -> tuple[nn.Module, nn.Module]:
    """The target and its draft, as they are held."""
    return KINDS[kind](zoo.ours(reference())), KINDS[kind](zoo.near(reference()))


def llm(folders: dict[str, str], kind: str = "float32", **config: Any) -> LLM:
    usual = {"max_batch_size": 16, "num_draft_tokens": 8, "draft": "self:1", "page_size": 4}
    target, draft = made(kind)
    return LLM.of(heads.assembled(EngineConfig(target="t", adapter=folders, **usual | config), target, draft))


def together(
    engine: LLM, sampling: SamplingParams, *, preempts: bool = False, **speculation: Any
) -> list[CompletionOutput]:
    """All prompts in one batch, each with its adapter."""
    asked = SpeculationParams(**speculation)
    requests = [
        engine._request(prompt, sampling, asked, None, adapter=name)
        for name, prompt in zip(NAMES, prompts(), strict=True)
    ]
    done = run(engine, requests, preempts=preempts)
    engine.engine.check_invariants()
    return [one for (one,) in done]


def alone(engine: LLM, sampling: SamplingParams) -> list[CompletionOutput]:
    """Each prompt with its adapter by itself, one token at a time."""
    pairs = zip(NAMES, prompts(), strict=True)
    return [engine.generate(prompt, sampling, speculation=OFF, adapter=name)[0] for name, prompt in pairs]


def said(done: list[CompletionOutput]) -> list[tuple[object, ...]]:
    """Tokens and the bits of their log-probabilities."""
    return [(completion.token_ids, completion.logprobs) for completion in done]


@cache
def of_merged(folder: str | None, index: int) -> tuple[int, ...]:
    """What transformers' `generate` makes of a prompt with the merged model."""
    model = reference() if folder is None else adapters.merged(reference(), Path(folder))
    return generated(model, prompts()[index])


def generated(model: PreTrainedModel, prompt: list[int]) -> tuple[int, ...]:
    return tuple(generate(model, prompt, NEW_TOKENS))


def merged_greedily(folders: dict[str, str]) -> list[tuple[int, ...]]:
    return [of_merged(None if name is None else folders[name], i) for i, name in enumerate(NAMES)]


# ------------------------------------------------------------------------------------------- equal to the merged model


@pytest.mark.parametrize(
    ("proposer", "how"),
    [
        ("none", "chunked"),
        ("model", "whole"),
        pytest.param("ngram", "bare", marks=pytest.mark.slow),
        pytest.param("self", "chunked", marks=pytest.mark.slow),
    ],
)
def test_equals_the_merged_model(folders: dict[str, str], proposer: str, how: str) -> None:
    config = {"whole": {}, "chunked": {"max_batch_tokens": 16}, "bare": {"prefix_cache": False}}[how]
    engine, want = llm(folders, **config), merged_greedily(folders)
    for num_draft in (1, 8):  # from the second round on, prompts are in the prefix cache
        fixed = {"mode": SpeculationMode.FIXED, "num_draft_tokens": num_draft, "proposer": proposer}
        done = together(engine, GREEDY, **fixed)
        assert [completion.token_ids for completion in done] == want, f"K={num_draft}"
    if proposer in ("model", "self"):
        assert sum(completion.stats.accepted for completion in done), "nothing was verified"


def test_equals_the_merged_model_when_preempted(folders: dict[str, str]) -> None:
    per_token = sum(kv_layout(reference().config, torch.float32).bytes_per_token * n // 3 for n in (3, 3, 1))
    engine = llm(folders, kv_memory=(30 * 4 * per_token + 1) / 2**30, prefix_cache=False)
    fixed = {"mode": SpeculationMode.FIXED, "num_draft_tokens": 3, "proposer": "model"}
    done = together(engine, GREEDY, preempts=True, **fixed)
    assert [completion.token_ids for completion in done] == merged_greedily(folders)


@pytest.mark.slow
@pytest.mark.parametrize("proposer", ["none", "model"])
def test_samples_equal_those_of_the_merged_model(folders: dict[str, str], proposer: str) -> None:
    done = together(llm(folders), SAMPLED, mode=SpeculationMode.FIXED, num_draft_tokens=5, proposer=proposer)
    assert [completion.token_ids for completion in done] == sampled_by_merged(tuple(folders.items()))


@cache
def sampled_by_merged(folders: tuple[tuple[str, str], ...]) -> list[tuple[int, ...]]:
    """One merged model at a time, which knows of no adapter."""
    found = []
    for name, prompt in zip(NAMES, prompts(), strict=True):
        model = reference() if name is None else adapters.merged(reference(), Path(dict(folders)[name]))
        engine = LLM.of(assemble(EngineConfig(target="merged"), zoo.as_served(zoo.ours(model))))
        found.append(engine.generate(prompt, SAMPLED, speculation=OFF)[0].token_ids)
    return found


@pytest.mark.parametrize(
    ("family", "prepare"),
    [("gpt2", zoo.as_served), ("mixtral", lambda model: model), ("phi3", zoo.as_served), ("opt", lambda model: model)],
)
def test_families(tmp_path: Path, family: str, prepare: Callable[[nn.Module], nn.Module]) -> None:
    """Joined by us, joined by the family, transposed, or not joined at all."""
    model = zoo.reference(family)
    linear = sorted({name.rpartition(".")[2] for name, _ in _matmuls(model)} - {"lm_head", "gate"})
    extra = {"fan_in_fan_out": True} if family == "gpt2" else {}
    folder = adapters.write(tmp_path / family, model, 3, 6.0, linear, **extra)
    engine = LLM.of(assemble(EngineConfig(target=family, adapter={"a": str(folder)}), prepare(zoo.ours(model))))
    merged, [prompt] = adapters.merged(model, folder), zoo.prompts(1)
    assert engine.generate(prompt, GREEDY, adapter="a")[0].token_ids == generated(merged, prompt)
    assert engine.generate(prompt, GREEDY)[0].token_ids == generated(model, prompt) != generated(merged, prompt)


def _matmuls(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(n, m) for n, m in model.named_modules() if type(m).__name__ in ("Linear", "Conv1D")]


@pytest.mark.parametrize(
    "config",
    [
        {"use_rslora": True},
        {"rank_pattern": {"q_proj": 5}, "alpha_pattern": {"v_proj": 1.5}},
        {"target_modules": r".*\.(q|v)_proj"},
        {"target_modules": "all-linear"},
    ],
    ids=lambda config: next(iter(config)),
)
def test_scales_ranks_and_targets(tmp_path: Path, config: dict[str, Any]) -> None:
    folder = adapters.write(tmp_path, reference(), 3, 4.0, ["q_proj", "v_proj"], **config)
    engine, [prompt] = llm({"a": str(folder)}), zoo.prompts(1)
    want = generated(adapters.merged(reference(), folder), prompt)
    assert engine.generate(prompt, GREEDY, adapter="a")[0].token_ids == want


# ---------------------------------------------------------------------------------------------------- the same bits


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "unpacked"])
def test_a_row_has_the_same_bits_in_any_company(folders: dict[str, str], kind: str) -> None:
    """Tokens and log-probabilities; with drafts, chunked and over cached pages, as alone."""
    engine = llm(folders, kind, max_batch_tokens=24, attention="rows" if kind.startswith("int8") else "auto")
    want = said(alone(engine, SAMPLED))
    for proposer, num_draft in (("none", 0), ("model", 4), ("ngram", 3), ("self", 2)):
        fixed = {"mode": SpeculationMode.FIXED, "num_draft_tokens": num_draft, "proposer": proposer}
        assert said(together(engine, SAMPLED, **fixed)) == want, proposer


@pytest.mark.parametrize("kind", some([kind for kind in KINDS if kind != "unpacked"], ["int8"]))
def test_rows_without_an_adapter_have_the_bits_of_a_model_without_any(folders: dict[str, str], kind: str) -> None:
    target, _ = made(kind)
    plain = LLM.of(assemble(EngineConfig(target="t", prefix_cache=False), target))
    want = plain.generate(prompts()[0], GREEDY)
    assert said(together(llm(folders, kind), GREEDY)[:1]) == said(want)


def test_tokens_are_the_merged_models_where_torch_multiplies(folders: dict[str, str]) -> None:
    done = together(llm(folders, "unpacked"), GREEDY, mode=SpeculationMode.FIXED, num_draft_tokens=3, proposer="model")
    assert [completion.token_ids for completion in done] == merged_greedily(folders)


@pytest.mark.slow
def test_reproducible_where_torch_multiplies(folders: dict[str, str]) -> None:
    """Passes of one shape: a row's place in a tile is not its place in the batch."""
    engine = llm(folders, "unpacked", reproducible=True)
    assert said(together(engine, GREEDY, num_draft_tokens=4, proposer="model")) == said(alone(engine, GREEDY))


# ------------------------------------------------------------------------------------------- the cache, and life times


def test_the_prefix_cache_keeps_adapters_apart(folders: dict[str, str]) -> None:
    engine, prompt = llm(folders), list(range(3, 40))
    asked = {name: engine.generate(prompt, GREEDY, speculation=OFF, adapter=name)[0] for name in NAMES}
    assert {completion.cached_prompt_tokens for completion in asked.values()} == {0}
    again = {name: engine.generate(prompt, GREEDY, speculation=OFF, adapter=name)[0] for name in NAMES}
    assert {completion.cached_prompt_tokens for completion in again.values()} == {36}
    assert [a.token_ids for a in again.values()] == [a.token_ids for a in asked.values()]


def test_a_sequence_keeps_an_adapter_that_is_unloaded_and_replaced(folders: dict[str, str]) -> None:
    """Under the same name, with other weights: nothing of the first adapter is found in the cache."""
    engine, prompt = llm({"a": folders["all"]}), list(range(3, 40))
    first, second = (generated(adapters.merged(reference(), Path(folders[n])), prompt) for n in ("all", "qv"))
    engine.engine.add(Request(request_id="r", token_ids=tuple(prompt), sampling=GREEDY, adapter="a"))
    outputs = fakes.Outputs()
    outputs.take(engine.engine.step().events)
    engine.engine.adapters.unload("a")
    with pytest.raises(InvalidRequest, match=r"adapter is 'a'; none is loaded"):
        engine.generate(prompt, GREEDY, adapter="a")
    engine.engine.adapters.load("a", Path(folders["qv"]))
    while engine.engine.has_work:
        outputs.take(engine.engine.step().events)
    assert tuple(outputs.tokens["r"]) == first != second
    assert engine.generate(prompt, GREEDY, adapter="a")[0].token_ids == second


def test_an_unloaded_adapter_is_freed_with_its_last_sequence(folders: dict[str, str]) -> None:
    store = llm({"a": folders["all"]}).engine.adapters
    held = store["a"]
    assert store._by_number[held.number] is held
    store.unload("a")
    number = held.number
    del held
    assert number not in store._by_number
