"""Latent attention over compressed keys and values: equal to transformers' own code, a row's bits its own."""

from __future__ import annotations

import copy
import random
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, PreTrainedModel

from pilotfish.engine import LLM, SamplingParams
from pilotfish.engine.attention import choose
from pilotfish.engine.choices import Weights
from pilotfish.engine.config import EngineConfig
from pilotfish.engine.errors import ModelError
from pilotfish.engine.kv.arena import KVArena, LayerKV
from pilotfish.engine.kv.batch import Feed
from pilotfish.engine.machine.threads import exactly
from pilotfish.engine.model.adapters.store import find_place
from pilotfish.engine.model.decoder.decoder import is_batch_invariant
from pilotfish.engine.model.decoder.families.table import architecture_for
from pilotfish.engine.model.decoder.latent import HeadProducts
from pilotfish.engine.model.fallback import kv_layout
from pilotfish.engine.model.runner import ModelRunner, layout_of_model
from pilotfish.engine.startup.check import Facts
from tests import adapters, zoo
from tests.families import generate

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore:The explicitly set RoPE scaling factor")
# Sizes that our C multiplies, with values that are no whole number of its vectors.
SIZES = {
    "vocab_size": zoo.VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
    "v_head_dim": 12, "first_k_dense_replace": 2, "max_position_embeddings": 128,
}  # fmt: skip


@lru_cache(maxsize=1)
def reference() -> PreTrainedModel:
    return zoo.with_large_weights(AutoConfig.for_model("deepseek_v3", **SIZES))


def runner_of(model: PreTrainedModel, attention: str = "auto") -> ModelRunner:
    arena = KVArena(layout_of_model(model), 8, 64, CPU)
    return ModelRunner(model, arena, choose(attention, CPU, row_wise=True))


@pytest.mark.parametrize("served", [False, True], ids=["torch", "served"])
def test_logits_equal_those_of_transformers(served: bool) -> None:
    model = zoo.as_served(reference()) if served else zoo.ours(reference())
    tokens = list(range(5, 35))
    want = reference()(torch.tensor([tokens])).logits[0]
    for attention in ("auto", "rows", "sdpa", "reference", "fixed"):
        runner = runner_of(model, attention)
        got = torch.cat(
            [runner.forward([Feed(tokens[:11], 0, [3], 11)]), runner.forward([Feed(tokens[11:], 11, [3], 19)])]
        )
        assert torch.allclose(got, want, atol=1e-4), attention


@pytest.mark.parametrize(
    ("weights", "dtype", "threads"),
    [
        ("native", torch.bfloat16, 2),
        ("int8", torch.float32, 1),
        pytest.param("int4", torch.bfloat16, 2, marks=pytest.mark.slow),
    ],
)
def test_logits_are_bitwise_the_same_in_any_batch(weights: Weights, dtype: torch.dtype, threads: int) -> None:
    model = zoo.as_served(copy.deepcopy(reference()).to(dtype), weights)
    if not is_batch_invariant(model):
        pytest.skip("floats need a C compiler")
    with exactly(threads):
        runner, draw = runner_of(model), random.Random(3)
        texts = [[draw.randrange(3, zoo.VOCAB) for _ in range(count)] for count in (17, 2, 40)]
        alone = [torch.cat([runner.forward([Feed([token], i, [0])]) for i, token in enumerate(text)]) for text in texts]
        together = runner.forward([Feed(text, 0, [i], len(text)) for i, text in enumerate(texts)])
        few = runner.forward([Feed(texts[0][:6], 0, [0], 6)])  # a single job, if the threads did not share its rows
    assert torch.equal(together, torch.cat(alone))
    assert torch.equal(few, alone[0][:6])


@pytest.mark.parametrize("inputs", [16, 12], ids=["in C", "by torch"])
def test_products_of_heads(inputs: int) -> None:
    weight, x = torch.randn(3, 20, inputs), torch.randn(7, 3, inputs)
    products = HeadProducts(weight, row_wise=True)
    got = products(x)
    assert torch.allclose(got, torch.einsum("thi,hoi->tho", x, weight), atol=1e-4)
    assert torch.equal(got, torch.cat([products(row[None]) for row in x]))


def test_deepseek_v3_keeps_576_numbers_of_a_token_and_layer() -> None:
    """Transformers' module would expand them."""
    config = AutoConfig.for_model("deepseek_v3")  # its defaults are the published sizes
    architecture = architecture_for(config)
    assert architecture is not None
    assert architecture.kv == (LayerKV(1, 576, 512, is_latent=True),) * 61
    assert kv_layout(config, torch.bfloat16).layers == (LayerKV(128, 192, 128),) * 61


def test_an_arena_of_latents_holds_them_once() -> None:
    arena = KVArena(layout_of_model(zoo.ours(reference())), 1, 8, CPU)
    assert [k.shape for k in arena.k] == [(8, 1, 48)] * 2
    assert all(v.data_ptr() == k.data_ptr() for k, v in zip(arena.k, arena.v, strict=True))


def test_an_adapter_of_the_expanding_matrix_is_refused_by_name() -> None:
    path = "model.layers.0.self_attn.kv_b_proj"
    with pytest.raises(ModelError, match=f"adapters of '{path}' .* at startup"):
        find_place(zoo.ours(reference()), path)
    assert find_place(zoo.decoder(reference(), expands=True), path).outputs == 4 * (16 + 12)


def test_a_server_that_starts_with_an_adapter_of_it_keeps_what_it_expands_to(tmp_path: Path) -> None:
    plain = reference()
    plain.save_pretrained(tmp_path / "model")
    folder = adapters.write(tmp_path / "adapter", plain, 3, 3.0, ["kv_b_proj"])
    llm = LLM(tmp_path / "model", adapter={"mine": str(folder)}, max_batch_size=2, dtype="float32")
    assert all(layer.heads == 4 for layer in llm.engine.runner.arena.layout.layers)
    for name, model in (("mine", adapters.merged(plain, folder)), ("", plain)):
        [said] = llm.generate([[5, 9, 11]], SamplingParams(max_tokens=8, ignore_eos=True), adapter=name or None)
        assert list(said.token_ids) == generate(model, [5, 9, 11], 8, eos_token_id=None)


def test_the_doctor_foretells_what_is_kept(tmp_path: Path) -> None:
    reference().save_pretrained(tmp_path)
    facts = Facts.read(str(tmp_path), None, "native", EngineConfig(target=str(tmp_path), dtype="float32"))
    assert facts.layout == layout_of_model(zoo.as_served(reference()))
