"""Every family of docs/models.md: saved, loaded from its folder, and equal to `generate` in ragged batches."""

from __future__ import annotations

import pytest
from transformers import AutoConfig

from engine.config import EngineConfig
from engine.params import SamplingParams
from engine.startup.build import assemble, build_engine
from engine.types import KVCursor, Request
from tests import fakes, zoo
from tests.families import NEW_TOKENS, Saved, generate, save


@pytest.fixture(scope="module", params=zoo.every_family())
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return save(request.param, tmp_path_factory.mktemp(request.param))


def outputs_of(saved: Saved, **config: object) -> fakes.Outputs:
    settings = {"target": saved.target, "draft": saved.draft, "threads": 1, "max_batch_size": 8}
    engine = build_engine(EngineConfig(**settings | config))
    params = SamplingParams(max_tokens=NEW_TOKENS)
    requests = [Request(request_id=str(i), token_ids=tuple(p), sampling=params) for i, p in enumerate(saved.prompts)]
    return fakes.run(engine, requests)


def tokens_of(outputs: fakes.Outputs) -> list[list[int]]:
    return [outputs.tokens[name] for name in sorted(outputs.tokens)]


@pytest.mark.parametrize("max_batch_tokens", [512, 13], ids=["whole", "chunked"])
@pytest.mark.parametrize("proposer", ["none", "ngram", "model"])
def test_equals_generate(saved: Saved, proposer: str, max_batch_tokens: int) -> None:
    outputs = outputs_of(saved, proposer=proposer, max_batch_tokens=max_batch_tokens)
    assert tokens_of(outputs) == saved.expected
    if proposer == "model":
        assert sum(ended.stats.accepted for ended in outputs.finished.values()) > 0


@pytest.mark.parametrize(("proposer", "num_draft"), [("suffix", 8), ("self", 1), ("self", 8)])
def test_equals_generate_with_fixed_drafts(saved: Saved, proposer: str, num_draft: int) -> None:
    described = AutoConfig.from_pretrained(saved.target)
    if proposer == "self" and (described.num_hidden_layers == 1 or described.model_type == "falcon"):
        proposer = "ngram"  # one layer has no earlier ones, and what runs one sequence at a time has no such draft
    drafts = {"proposer": proposer, "num_draft_tokens": num_draft, "speculation": "fixed"}
    assert tokens_of(outputs_of(saved, max_batch_tokens=29, **drafts)) == saved.expected


def test_equals_generate_after_preemption_and_from_the_cache(saved: Saved) -> None:
    """Pages for little more than one sequence; then for all, and the same prompts again, from cached pages."""
    settings = {"target": saved.target, "draft": saved.draft, "threads": 1, "max_batch_size": 8, "max_model_len": 96}
    engine = build_engine(EngineConfig(**settings, proposer="model", speculation="fixed", page_size=4))
    pool, hog = engine.pages, KVCursor()
    assert pool.reserve(hog, 4 * (pool.num_pages - 26))
    params, cached = SamplingParams(max_tokens=NEW_TOKENS), 0
    for _ in range(3):
        outputs = fakes.Outputs()
        for i, prompt in enumerate(saved.prompts):
            engine.add(Request(request_id=str(i), token_ids=tuple(prompt), sampling=params))
        while engine.has_work:
            outputs.take(engine.step().events)
            pool.check_invariants([hog, *(s.target for s in engine._scheduler.sequences)])
        assert tokens_of(outputs) == saved.expected
        pool.release(hog)
        cached = sum(ended.cached_prompt_tokens for ended in outputs.finished.values())
    assert cached > 0


SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
SERVED_UNASKED = {
    "gpt_neox": {},
    "phi": {},
    "starcoder2": {"sliding_window": 9},
    "granite": {},
    "olmo2": {},
    "olmo3": {"sliding_window": 9},
    "cohere2": {"sliding_window": 9},
    "smollm3": {},
    "exaone4": {"num_key_value_heads": 2, "sliding_window": 9},
    "glm4": {"head_dim": 8},
    "minicpm3": zoo.LATENT,
    "longcat_flash": {**zoo.LATENT, "num_layers": 1, "head_dim": 8, "n_routed_experts": 4, "zero_expert_num": 1,
                      "moe_topk": 2, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 16},
    "granite_swa": {"num_key_value_heads": 2, "sliding_window": 9,
                    "layer_types": ["sliding_attention", "full_attention"]},
    "nemotron": {"num_key_value_heads": 2},
    "persimmon": {},
    "codegen": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "rotary_dim": 4},
    "gpt_bigcode": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "n_inner": 48},
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", SERVED_UNASKED)
def test_what_the_probe_lets_through_is_right(kind: str) -> None:
    """Families without a word of code or test of their own: the probe alone decides."""
    model = zoo.with_large_weights(AutoConfig.for_model(kind, **SIZES, **SERVED_UNASKED[kind]))
    engine = assemble(EngineConfig(target=kind, max_batch_size=8), zoo.ours(model))
    params, prompts = SamplingParams(max_tokens=NEW_TOKENS), zoo.prompts()
    requests = [Request(request_id=str(i), token_ids=tuple(p), sampling=params) for i, p in enumerate(prompts)]
    assert tokens_of(fakes.run(engine, requests)) == [generate(model, prompt) for prompt in prompts]


@pytest.mark.parametrize("family", ["llama", "llama-tied", "gpt2"])
def test_sharded_and_tied_or_not(family: str, tmp_path: object) -> None:
    saved = save(family, tmp_path, max_shard_size="10KB")
    assert tokens_of(outputs_of(saved)) == saved.expected
