"""Latent attention over compressed keys and values: equal to transformers' own code, a row's bits its own."""

from __future__ import annotations

import copy
import random
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, PreTrainedModel

from engine.attention import choose
from engine.config import EngineConfig
from engine.errors import ModelError
from engine.kv.arena import KVArena, LayerKV
from engine.kv.batch import Feed
from engine.kv.latent import HeadProducts, LatentHeads
from engine.machine.threads import exactly
from engine.model.adapters.places import find_place
from engine.model.latent import compress
from engine.model.linear.packed import is_batch_invariant
from engine.model.runner import ModelRunner, kv_layout, layout_of_model
from engine.startup.doctor import Facts
from tests import zoo

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


def check_logits(model: PreTrainedModel, plain: PreTrainedModel) -> None:
    tokens = list(range(5, 35))
    got = runner_of(model).forward([Feed(tokens, 0, [0], len(tokens))])
    assert torch.allclose(got, plain(torch.tensor([tokens])).logits[0], atol=1e-4)


@pytest.mark.parametrize("served", [False, True], ids=["torch", "served"])
def test_logits_equal_those_of_transformers(served: bool) -> None:
    model = zoo.as_served(reference()) if served else zoo.ours(reference())
    assert compress(model, row_wise=False) == (0 if served else 2)  # a decoder keeps them from the start
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
        ("packed", torch.bfloat16, 2),
        ("int8", torch.float32, 1),
        pytest.param("int4", torch.bfloat16, 2, marks=pytest.mark.slow),
    ],
)
def test_logits_are_bitwise_the_same_in_any_batch(weights: str, dtype: torch.dtype, threads: int) -> None:
    model = zoo.as_served(copy.deepcopy(reference()).to(dtype), None if weights == "packed" else weights)
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
    config = AutoConfig.for_model("deepseek_v3")  # its defaults are the published sizes
    expanded, compressed = (kv_layout(config, torch.bfloat16, compressed=compressed) for compressed in (False, True))
    assert compressed.layers == (LayerKV(1, 576, 512, is_latent=True),) * 61
    assert compressed.bytes_per_token == 61 * 2 * 576
    assert expanded.bytes_per_token == 61 * 2 * 128 * (192 + 128)


def test_an_arena_of_latents_holds_them_once() -> None:
    model = zoo.ours(reference())
    compress(model, row_wise=False)
    arena = KVArena(layout_of_model(model), 1, 8, CPU)
    assert [k.shape for k in arena.k] == [(8, 1, 48)] * 2
    assert all(v.data_ptr() == k.data_ptr() for k, v in zip(arena.k, arena.v, strict=True))


def test_a_copy_has_latents_of_its_own_layers() -> None:
    model = zoo.ours(reference())
    compress(model, row_wise=False)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        model.get_submodule("model.layers.0.self_attn.kv_a_proj_with_mqa").weight.zero_()
    check_logits(twin, reference())


def test_layers_that_expand_otherwise_stay_expanded() -> None:
    model = zoo.ours(reference())
    layer = type(model.get_submodule("model.layers.0.self_attn"))

    class Other(layer):
        def expand_kv(self, latent: torch.Tensor, rotary: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            key, value = super().expand_kv(latent, rotary)
            return key * 2, value

    model.get_submodule("model.layers.1.self_attn").__class__ = Other
    assert compress(model, row_wise=False) == 0
    assert not any(isinstance(module, LatentHeads) for module in model.modules())
    assert layout_of_model(model) == kv_layout(model.config, torch.float32)


def test_an_adapter_of_the_expanding_matrix_is_refused_by_name() -> None:
    model = zoo.ours(reference())
    path = "model.layers.0.self_attn.kv_b_proj"
    assert find_place(model, path).outputs == 4 * (16 + 12)
    compress(model, row_wise=False)
    with pytest.raises(ModelError, match=f"'{path}' expands latents"):
        find_place(model, path)


def test_the_doctor_foretells_what_is_kept(tmp_path: Path) -> None:
    reference().save_pretrained(tmp_path)
    model = zoo.as_served(reference())
    facts = Facts.read(str(tmp_path), None, "native", EngineConfig(target=str(tmp_path), dtype="float32"))
    assert facts.layout == layout_of_model(model)


def test_a_router_that_multiplies_its_own_matrix_is_not_packed() -> None:
    """LongCat-Flash; its layers have two attentions each, and scale their latents."""
    mixture = {"num_layers": 1, "head_dim": 16, "n_routed_experts": 4, "zero_expert_num": 1, "moe_topk": 2}
    widths = {"ffn_hidden_size": 48, "expert_ffn_hidden_size": 16}
    plain = zoo.with_large_weights(AutoConfig.for_model("longcat_flash", **SIZES, **mixture, **widths))
    model = zoo.as_served(zoo.ours(plain))
    assert compress(model, row_wise=False) == 2
    check_logits(model, plain)
