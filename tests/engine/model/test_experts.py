"""The experts of a mixture: equal to transformers' own code, in floats and rounded, a row's bits its own."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pilotfish.engine.choices import Weights
from pilotfish.engine.config import EngineConfig
from pilotfish.engine.machine.threads import exactly
from pilotfish.engine.model.decoder.decoder import is_batch_invariant, runs_in_c
from pilotfish.engine.model.decoder.experts import MixtureMLP
from pilotfish.engine.model.linear.experts import FusedExperts, RoutedExperts
from pilotfish.engine.native import multiplies
from pilotfish.engine.native.experts import ExpertMatrices
from pilotfish.engine.startup.build import assemble
from tests import fakes, zoo

NEW_TOKENS = 12
SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_key_value_heads": 4}
SIX = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}  # of six experts, which no vector is as long as
GROUPS = {"n_group": 2, "topk_group": 1, **SIX}
KINDS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "qwen2_moe": {"num_experts": 6, "shared_expert_intermediate_size": 64, **SIX},
    "qwen3_moe": {"num_experts": 6, "head_dim": 16, **SIX},
    "glm4_moe": {"head_dim": 16, "n_routed_experts": 6, "first_k_dense_replace": 1, **GROUPS},
    "gpt_oss": {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16, "swiglu_limit": 0.5},
}
needs_c = pytest.mark.skipif(not multiplies(torch.float32), reason="needs a C compiler")
pytestmark = pytest.mark.filterwarnings("ignore:The explicitly set RoPE scaling factor")


def plain_model(kind: str, **more: object) -> PreTrainedModel:
    return zoo.with_large_weights(zoo.config_of(kind, **SIZES | KINDS[kind] | more))


def mixture_of(model: nn.Module) -> MixtureMLP:
    return next(module for module in model.modules() if isinstance(module, MixtureMLP))


def experts_of(model: PreTrainedModel, weights: Weights = "native") -> RoutedExperts:
    """Of the first mixture of a model, as a server on a CPU has them."""
    return cast("RoutedExperts", mixture_of(zoo.as_served(model, weights)).experts)


def batch(rows: int = 11) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, two different experts of six for each, and their weights."""
    generator = torch.Generator().manual_seed(1)
    chosen = torch.stack([torch.randperm(6, generator=generator)[:2] for _ in range(rows)])
    return torch.randn(rows, 64, generator=generator), chosen, torch.rand(rows, 2, generator=generator)


@pytest.mark.parametrize(
    ("kind", "more"),
    [("mixtral", {}), ("mixtral", {"hidden_act": "gelu_new"}), ("gpt_oss", {})],
    ids=["SiLU", "GELU", "limits, biases and turns"],
)
@torch.inference_mode()
def test_our_c_single_matrices_and_stacks_give_what_the_original_gives(kind: str, more: dict[str, Any]) -> None:
    model, given = plain_model(kind, **more), batch()
    original = next(m for m in model.modules() if getattr(getattr(m, "down_proj", None), "ndim", 0) == 3)
    want, ours, stacks = original(*given), experts_of(model), mixture_of(zoo.on_kernels(model)).experts
    assert isinstance(ours._native(given[0]), ExpertMatrices) or not multiplies(torch.float32)
    assert isinstance(stacks, FusedExperts)
    got = [ours(*given), stacks(*given)]
    ours._native = lambda _: None
    for each in (*got, ours(*given)):
        assert torch.allclose(each, want, atol=1e-5 * float(want.std()), rtol=1e-5)


@needs_c
@pytest.mark.parametrize(
    ("weights", "dtype", "threads"),
    [
        ("native", torch.float32, 2),
        ("native", torch.bfloat16, 1),
        ("int8", torch.float32, 1),
        ("int4", torch.float32, 2),
    ],
)
def test_a_row_has_the_same_bits_alone_and_in_company(weights: Weights, dtype: torch.dtype, threads: int) -> None:
    ours, (x, chosen, shares) = experts_of(plain_model("gpt_oss").to(dtype), weights), batch(rows=130)
    x = x.to(dtype)
    with exactly(threads):
        together = ours(x, chosen, shares)
        alone = torch.cat([ours(x[i : i + 1], chosen[i : i + 1], shares[i : i + 1]) for i in range(0, len(x), 13)])
    assert together.dtype == dtype
    assert torch.equal(together[::13], alone)


@needs_c
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_rounded_experts_in_c_are_the_products_of_single_matrices(weights: Weights) -> None:
    """The same integers, and float32 between them; only what lies between is another code for the same function."""
    ours, given = experts_of(plain_model("mixtral"), weights), batch()
    in_c, ours._native = ours(*given), lambda _: None
    assert torch.allclose(in_c, ours(*given), atol=0.02 * float(in_c.std()), rtol=0)


@needs_c
def test_experts_that_are_not_there_add_nothing() -> None:
    ours = experts_of(plain_model("mixtral"))
    x, chosen, weights = batch()
    without = torch.where(torch.arange(2) == 0, chosen, torch.tensor(6))
    want = ours(x, chosen, weights * torch.tensor([1.0, 0.0]))
    assert torch.equal(ours(x, without, weights), want)
    nowhere = ours(x, torch.full_like(chosen, -1), weights)
    assert torch.equal(nowhere, torch.zeros_like(x))
    assert ours(x[:0], chosen[:0], weights[:0]).shape == (0, 64)


# ------------------------------------------------------------------------------------------------------- whole models


@needs_c
@pytest.mark.parametrize(("kind", "dtype"), [("glm4_moe", torch.float32), ("qwen2_moe", torch.bfloat16)])
def test_a_mixture_gives_a_row_the_same_bits_alone_and_in_company(kind: str, dtype: torch.dtype) -> None:
    """Its router and its shared expert too, whose gate is one number for each row."""
    model = zoo.as_served(plain_model(kind).to(dtype))
    assert is_batch_invariant(model)
    block = mixture_of(model)
    x = torch.randn(1, 61, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    with torch.inference_mode():
        alone = torch.cat([block(row) for row in x.split(1, 1)], 1)
        assert torch.equal(block(x), alone)


def without_c(patch: pytest.MonkeyPatch) -> None:
    """Matrices of floats are torch's."""
    for part in ("weights", "experts"):
        patch.setattr(f"pilotfish.engine.model.decoder.{part}.multiplies", lambda _: False)


def test_without_our_c_a_router_gives_a_row_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    without_c(monkeypatch)
    plain = plain_model("glm4_moe")
    router, original = mixture_of(zoo.as_served(plain)).router, plain.get_submodule("model.layers.1.mlp.gate")
    x = torch.randn(37, 64, generator=torch.Generator().manual_seed(0))
    many = router(x)
    assert torch.equal(router(x[:1]), many[:1])
    assert torch.allclose(many, x @ original.weight.t(), atol=1e-5)


@pytest.mark.parametrize(
    ("in_c", "dtype"), [(True, torch.bfloat16), pytest.param(False, torch.float32, marks=pytest.mark.slow)]
)
def test_reproducible_logits_are_the_same_bits_alone_and_drafted_for_in_company(
    in_c: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In C, and row by row, which is what runs where our C does not multiply."""
    if not in_c:
        without_c(monkeypatch)

    def logprobs(prompts: list[list[int]], proposer: str) -> Any:
        """Of the last of them."""
        model = zoo.as_served(plain_model("glm4_moe").to(dtype))
        config = EngineConfig(target="x", max_batch_size=8, reproducible=True, proposer=proposer)
        asked = fakes.requests(prompts, max_tokens=NEW_TOKENS, logprobs=3, ignore_eos=True)
        return fakes.run(assemble(config, model), asked).logprobs[str(len(prompts) - 1)]

    assert logprobs(zoo.prompts()[3:4], "none") == logprobs(zoo.prompts()[:4], "ngram")


def test_rounded_models_write_the_same_with_and_without_drafts() -> None:
    def run(model: PreTrainedModel, proposer: str) -> dict[str, list[int]]:
        """Greedy tokens of unequal prompts in one batch."""
        config = EngineConfig(target="x", max_batch_size=8, max_batch_tokens=29, proposer=proposer)
        return fakes.run(assemble(config, model), fakes.requests(zoo.prompts(), max_tokens=NEW_TOKENS)).tokens

    model, again = (zoo.as_served(plain_model("qwen3_moe"), "int4") for _ in range(2))
    experts = [module for module in model.modules() if isinstance(module, RoutedExperts)]
    assert all(cast("Any", matmul).codes.bits == 4 for e in experts for matmul in (*e.ups, *e.downs))
    assert run(model, "ngram") == run(again, "none")
    assert runs_in_c(model) == multiplies(torch.float32)
