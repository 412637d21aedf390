"""Stacked experts as single matrices: equal to transformers' own code, in floats and rounded, a row's bits its own."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.config import EngineConfig
from engine.machine.threads import exactly
from engine.model.decoder.experts import MixtureMLP
from engine.model.linear.experts import OwnGate, RoutedExperts
from engine.model.linear.grouped import GroupedLinear
from engine.model.linear.packed import is_batch_invariant, pack, packs_whole, runs_in_c
from engine.model.linear.rounding import round_weight
from engine.model.linear.routing import RowWiseRouting, _RowWise, make_routing_row_wise
from engine.model.linear.unstack import recognised, unstack
from engine.native import multiplies
from engine.native.experts import ExpertMatrices
from engine.startup.build import assemble
from tests import fakes, zoo

NEW_TOKENS = 12
SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_key_value_heads": 4}
SIX = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}  # of six experts, which no vector is as long as
GROUPS = {"n_routed_experts": 6, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, **SIX}
KINDS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "qwen2_moe": {"num_experts": 6, "shared_expert_intermediate_size": 64, **SIX},
    "qwen3_moe": {"num_experts": 6, "head_dim": 16, **SIX},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 2},
    "glm4_moe": {"head_dim": 16, **GROUPS},
    "deepseek_v3": GROUPS | zoo.LATENT,
    "gpt_oss": {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 9},
    "phimoe": {"num_local_experts": 6},
    "gemma4_text": {"num_experts": 6, "top_k_experts": 2, "enable_moe_block": True, "head_dim": 16, **SIX},
    "nemotron_h": {"n_routed_experts": 6, "layers_block_type": ["moe", "attention"], **SIX},
    "deepseek_v4": {"n_routed_experts": 6, "swiglu_limit": 0.5, **SIX},
}
needs_c = pytest.mark.skipif(not multiplies(torch.float32), reason="needs a C compiler")
pytestmark = pytest.mark.filterwarnings("ignore:The explicitly set RoPE scaling factor")


def config_of(kind: str) -> Any:
    return zoo.config_of(kind, **SIZES | KINDS[kind])


def experts_of(kind: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The first module of stacked experts of a family, with random weights, in a module of its own."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(kind))
    name, _ = next(recognised(model))
    holder = nn.Module()
    holder.experts = model.get_submodule(name)
    generator = torch.Generator().manual_seed(0)
    for key, weight in dict(holder.experts.named_parameters()).items():
        drawn = torch.randn(weight.shape, generator=generator, device="cpu") / 8
        setattr(holder.experts, key, nn.Parameter(drawn.to(dtype)))
    return holder


def batch(experts: int = 6, rows: int = 11) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, two different experts for each, and their weights."""
    generator = torch.Generator().manual_seed(1)
    chosen = torch.stack([torch.randperm(experts, generator=generator)[:2] for _ in range(rows)])
    return torch.randn(rows, 64, generator=generator), chosen, torch.rand(rows, 2, generator=generator)


def packed(holder: nn.Module) -> RoutedExperts:
    """A holder's experts in our C."""
    holder.get_output_embeddings, holder.device = lambda: None, torch.device("cpu")  # what `pack` asks of a model
    holder.dtype = next(holder.parameters()).dtype
    assert pack(holder) == 12
    return holder.experts


def rounded(holder: nn.Module, bits: int) -> RoutedExperts:
    unstack(holder)
    for matmuls in (holder.experts.ups, holder.experts.downs):
        for i, matmul in enumerate(matmuls):
            matmuls[i] = GroupedLinear(round_weight(matmul.weight, bits, matmul.bias))
    return holder.experts


@pytest.mark.parametrize("kind", KINDS)
def test_single_matrices_and_our_c_give_what_the_original_gives(kind: str) -> None:
    holder = experts_of(kind)
    want = holder.experts(*batch())
    assert unstack(holder) == 1
    assert torch.allclose(holder.experts(*batch()), want, atol=1e-5, rtol=1e-5)
    if multiplies(torch.float32):
        ours = packed(experts_of(kind))
        assert isinstance(ours._native(want), ExpertMatrices)
        assert torch.allclose(ours(*batch()), want, atol=1e-5, rtol=1e-5)


@needs_c
@pytest.mark.parametrize(("how", "threads"), [(torch.float32, 2), (torch.bfloat16, 1), (8, 1), (4, 2)], ids=str)
def test_a_row_has_the_same_bits_alone_and_in_company(how: Any, threads: int) -> None:
    holder = experts_of("gpt_oss", how if isinstance(how, torch.dtype) else torch.float32)
    ours = packed(holder) if isinstance(how, torch.dtype) else rounded(holder, how)
    x, chosen, weights = batch(rows=130)
    x = x.to(how) if isinstance(how, torch.dtype) else x
    with exactly(threads):
        together = ours(x, chosen, weights)
        alone = torch.cat([ours(x[i : i + 1], chosen[i : i + 1], weights[i : i + 1]) for i in range(0, len(x), 13)])
    assert together.dtype == x.dtype
    assert torch.equal(together[::13], alone)


@needs_c
@pytest.mark.parametrize("bits", [8, 4])
def test_rounded_experts_in_c_are_the_products_of_single_matrices(bits: int) -> None:
    """The same integers, and float32 between them; only what lies between is another code for the same function."""
    ours, given = rounded(experts_of("mixtral"), bits), batch()
    in_c, ours._native = ours(*given), lambda _: None
    assert torch.allclose(in_c, ours(*given), atol=0.02 * float(in_c.std()), rtol=0)


@needs_c
def test_experts_that_are_not_there_add_nothing() -> None:
    ours = packed(experts_of("mixtral"))
    x, chosen, weights = batch()
    without = torch.where(torch.arange(2) == 0, chosen, torch.tensor(6))
    want = ours(x, chosen, weights * torch.tensor([1.0, 0.0]))
    assert torch.equal(ours(x, without, weights), want)
    nowhere = ours(x, torch.full_like(chosen, -1), weights)
    assert torch.equal(nowhere, torch.zeros_like(x))
    assert ours(x[:0], chosen[:0], weights[:0]).shape == (0, 64)


def test_code_that_is_not_understood_stays() -> None:
    """Shaped like experts, and twice of what they give."""
    holder = experts_of("mixtral")
    kind = type(holder.experts)
    holder.experts.__class__ = type(
        "Doubling", (kind,), {"forward": lambda self, *given: 2 * kind.forward(self, *given)}
    )
    want = holder.experts(*batch())
    assert unstack(holder) == 0
    assert torch.equal(holder.experts(*batch()), want)


def test_experts_that_read_rows_without_a_choice_stay() -> None:
    """Llama 4 hands every expert rows of its own."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            zoo.config_of("llama4_text", **SIZES, head_dim=16, num_local_experts=2, intermediate_size_mlp=64)
        )
    assert not dict(recognised(model))
    assert not packs_whole(model)


@needs_c
def test_an_unknown_gate_runs_one_row_at_a_time() -> None:
    holder = experts_of("mixtral")
    kind = type(holder.experts)
    holder.experts.__class__ = type("Odd", (kind,), {"_apply_gate": lambda _, both: both.cos().chunk(2, -1)[1]})
    want = holder.experts(*batch())
    ours = packed(holder)
    assert isinstance(ours.gate, OwnGate)
    assert ours._native(want) is None
    together, (x, chosen, weights) = ours(*batch()), batch()
    assert torch.equal(together[3:4], ours(x[3:4], chosen[3:4], weights[3:4]))


# ------------------------------------------------------------------------------------------------------- whole models


def plain_model(kind: str) -> PreTrainedModel:
    return zoo.with_large_weights(config_of(kind))


def run(model: PreTrainedModel, **config: Any) -> dict[str, list[int]]:
    """Greedy tokens of unequal prompts in one batch."""
    engine = assemble(EngineConfig(target="x", max_batch_size=8, max_batch_tokens=29, **config), model)
    return fakes.run(engine, fakes.requests(zoo.prompts(), max_tokens=NEW_TOKENS)).tokens


@needs_c
@pytest.mark.parametrize(("kind", "dtype"), [("glm4_moe", torch.float32), ("qwen2_moe", torch.bfloat16)])
def test_a_mixture_gives_a_row_the_same_bits_alone_and_in_company(kind: str, dtype: torch.dtype) -> None:
    """Its router and its shared expert too, whose gate is one number for each row."""
    model = zoo.as_served(plain_model(kind).to(dtype))
    assert is_batch_invariant(model)
    block = next(module for module in model.modules() if isinstance(module, MixtureMLP))
    x = torch.randn(1, 61, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    with torch.inference_mode():
        alone = torch.cat([block(row) for row in x.split(1, 1)], 1)
        assert torch.equal(block(x), alone)


def test_without_our_c_a_router_gives_a_row_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.model.linear.routing.multiplies", lambda _: False)
    model = zoo.ours(plain_model("glm4_moe"))
    unstack(model)
    make_routing_row_wise(model)
    router = next(module for module in model.modules() if isinstance(module, RowWiseRouting))
    x = torch.randn(37, 64, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        want = router.inner.gate(x)
        with _RowWise(router._routers):
            one, many = (router.inner.gate(x[:n]) for n in (1, 37))
    assert all(torch.equal(a, b[:1]) for a, b in zip(one, many, strict=True))
    assert torch.allclose(many[0], want[0], atol=1e-5)


@pytest.mark.parametrize(
    ("served", "dtype"), [(True, torch.bfloat16), pytest.param(False, torch.float32, marks=pytest.mark.slow)]
)
def test_reproducible_logits_are_the_same_bits_alone_and_drafted_for_in_company(
    served: bool, dtype: torch.dtype
) -> None:
    """In C, and row by row, which is what runs where our C does not multiply."""

    def logprobs(prompts: list[list[int]], proposer: str) -> Any:
        """Of the last of them."""
        model = zoo.ours(plain_model("glm4_moe")).to(dtype)
        config = EngineConfig(target="x", max_batch_size=8, reproducible=True, proposer=proposer)
        engine = assemble(config, zoo.as_served(model) if served else model)
        asked = fakes.requests(prompts, max_tokens=NEW_TOKENS, logprobs=3, ignore_eos=True)
        return fakes.run(engine, asked).logprobs[str(len(prompts) - 1)]

    assert logprobs(zoo.prompts()[3:4], "none") == logprobs(zoo.prompts()[:4], "ngram")


def test_rounded_models_write_the_same_with_and_without_drafts() -> None:
    def made() -> PreTrainedModel:
        return zoo.as_served(plain_model("qwen3_moe"), "int4")

    model = made()
    experts = [module for module in model.modules() if isinstance(module, RoutedExperts)]
    assert all(cast("Any", matmul).codes.bits == 4 for e in experts for matmul in (*e.ups, *e.downs))
    assert run(model, proposer="ngram") == run(made(), proposer="none")
    assert runs_in_c(model) == multiplies(torch.float32)
