"""8-bit floats: how they round, which matrices they take, and that a pair of them decodes exactly."""

from __future__ import annotations

import copy
import dataclasses
import logging

import pytest
import torch
from torch import nn
from transformers import LlamaConfig

from engine.errors import ModelError
from engine.kernels import faults, has_triton, reference
from engine.kernels.args import LARGEST
from engine.kernels.reference import round_rows
from engine.model.fusion.fuse_cuda import fuse_for_cuda, round_ahead
from engine.model.fusion.kernel_layers import KernelGate, KernelLayer, LayerOps
from engine.model.linear.fp8 import Fp8Linear, to_fp8
from engine.model.quantize import weight_bytes
from tests import zoo
from tests.engine.model.test_fuse import logits

WIDE = LlamaConfig(
    vocab_size=zoo.VOCAB, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, bos_token_id=1, eos_token_id=zoo.END,
)  # fmt: skip


def _runs_here() -> bool:
    """Whether this torch multiplies 8-bit floats with scales by row on a CPU; on GPUs every one does."""
    try:
        Fp8Linear(nn.Linear(16, 16, dtype=torch.bfloat16))(torch.ones(2, 16, dtype=torch.bfloat16))
    except RuntimeError:
        return False
    return True


MULTIPLIES = pytest.mark.skipif(not _runs_here(), reason="torch has no scales by row on this CPU")


def model(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    return zoo.ours(zoo.with_large_weights(WIDE)).to(dtype)


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e4])
def test_rounding_keeps_three_bits(size: float) -> None:
    """Four bits of a number that is not tiny beside its row's largest: off by a sixteenth at most; zeros stay."""
    rows = torch.randn(9, 64, generator=torch.Generator().manual_seed(0)) * size
    rows[3], rows[4, 0] = 0, 0
    given = round_rows(rows)
    bits, scale = given.rows, given.scale
    assert bits.dtype is torch.float8_e4m3fn
    assert float(bits.float().abs().amax()) == LARGEST
    back = bits.float() * scale
    is_normal = rows.abs() > rows.abs().amax(1, keepdim=True) / LARGEST * 2**-6
    assert ((back - rows).abs() <= rows.abs() / 16)[is_normal].all()
    assert not back[3].any()


@MULTIPLIES
def test_a_matmul_is_that_of_the_rounded_numbers() -> None:
    """Rows and matrix rounded, products and sums exact but for the last rounding; a row does not see the others."""
    torch.manual_seed(1)
    linear = nn.Linear(64, 48, dtype=torch.bfloat16)
    x, made = torch.randn(2, 5, 64).bfloat16(), Fp8Linear(linear)
    rows, weight = (given.rows.float() * given.scale for given in (round_rows(x), round_rows(linear.weight.detach())))
    want = rows @ weight.t() + linear.bias.float()
    got = made(x)
    assert got.shape == (2, 5, 48)
    assert torch.allclose(got.view(-1, 48).float(), want, rtol=2e-2, atol=2e-2)
    assert torch.allclose(made(x[1:, 2:3])[0, 0].float(), got[1, 2].float(), rtol=1e-2, atol=1e-2)


def held(made: nn.Module) -> int:
    """Bytes of all parameters, shared ones once."""
    storages = [weight.untyped_storage() for weight in made.parameters()]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize("fused", [False, True])
def test_every_matmul_is_rounded_and_none_is_kept_twice(fused: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Of a fused model `o_proj`, the joined ones and `down_proj`, in the stand-ins and in the originals they keep."""
    made = model()
    head, (plain, small) = made.get_output_embeddings(), (weight_bytes(made, made.dtype, w) for w in ("native", "fp8"))
    if fused:
        fuse_for_cuda(made, reference)
    count = 4 * 2 if fused else 7 * 2
    with caplog.at_level(logging.INFO):
        swapped = to_fp8(made)
    assert (swapped.done, swapped.stayed) == (count, {"lm_head": "head"})
    assert f"{count} of {count + 1} matrices are in fp8; others: 1 head (lm_head ...)" in caplog.text
    assert made.get_output_embeddings() is head
    linears = {name for name, module in made.named_modules(remove_duplicate=False) if isinstance(module, nn.Linear)}
    assert linears == {"lm_head"}
    norms = 2 * WIDE.hidden_size * (2 * 2 + 1) if fused else 0  # fused norms have their scales in float32
    assert held(made) == small + norms < plain
    if fused:
        attention = made.model.layers[0].inner.self_attn
        assert attention.o_proj is attention.fused.inner.o_proj
        assert isinstance(attention.o_proj, Fp8Linear)


def test_what_stays_is_named_with_its_reason() -> None:
    made = zoo.ours(zoo.reference("mixtral")).to(torch.bfloat16)
    made.model.layers[0].self_attn.o_proj = nn.Linear(32, 24, dtype=torch.bfloat16)
    swapped = to_fp8(made)
    assert swapped.stayed.pop("lm_head") == "head"
    assert swapped.stayed.pop("model.layers.0.self_attn.o_proj") == "of sizes that do not fit"
    stacked = {name for name, reason in swapped.stayed.items() if reason == "stacked experts"}
    assert stacked
    assert all(reason == "router" for name, reason in swapped.stayed.items() if name not in stacked)
    assert swapped.done == 4 * 2 - 1


@MULTIPLIES
def test_rows_are_rounded_by_what_makes_them() -> None:
    """Norms and gates hand 8-bit floats to the matmul; logits are what they were, and so are copies of the model."""
    made = model()
    fuse_for_cuda(made, reference)
    to_fp8(made)
    want = logits(made)
    calls: list[str] = []

    def counted(name: str):
        def run(*args: object):
            calls.append(name)
            return getattr(reference, name)(*args)

        return run

    ops = LayerOps.of(reference)
    kinds = ("add_norm", "add_norm_round", "gate", "gate_round", "round_rows")
    assert round_ahead(made, dataclasses.replace(ops, **{name: counted(name) for name in kinds})) == {
        "matmuls": 8, "gates": 2, "norms": 4,
    }  # fmt: skip
    assert torch.equal(logits(made), want)
    assert torch.equal(logits(copy.deepcopy(made)), want)
    for module in made.modules():
        if hasattr(module, "ops"):
            module.ops = dataclasses.replace(ops, **{name: counted(name) for name in kinds})
    calls.clear()
    logits(made)  # two passes
    assert {name: calls.count(name) for name in kinds} == {
        "add_norm": 2,  # the last sum with the final norm, whose rows the head reads
        "add_norm_round": 2 * 4, "gate": 0, "gate_round": 2 * 2, "round_rows": 2 * 2,
    }  # fmt: skip


@MULTIPLIES
def test_without_a_ragged_batch_the_originals_run_in_fp8_too() -> None:
    made = model()
    fuse_for_cuda(made, reference)
    to_fp8(made)
    round_ahead(made, reference)
    want = logits(made)
    made.set_attn_implementation("eager")
    tokens = torch.tensor([list(range(5, 25))])
    got = made(tokens, use_cache=False).logits[0].float()
    off = (got - want[:20].float()).square().mean().sqrt() / want.float().std()
    assert off < 0.2, "attention is computed in another order, and 8-bit floats tell it"


@pytest.mark.skipif(not has_triton(), reason="triton is not installed")
@MULTIPLIES
@pytest.mark.parametrize(
    ("name", "kind"),
    [("gate_round", "gates that round"), ("add_norm_round", "norms that round"), ("round_rows", "rounding")],
)
def test_a_card_whose_compiler_knows_no_fp8_rounds_in_plain_torch(
    name: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise faults()[0]("type fp8e4nv not supported in this architecture")

    made = model()
    fuse_for_cuda(made, dataclasses.replace(LayerOps.of(reference), **{name: fails}))
    to_fp8(made)
    want = logits(made)
    with caplog.at_level(logging.WARNING):
        round_ahead(made, dataclasses.replace(LayerOps.of(reference), **{name: fails}))
    assert torch.equal(logits(made), want)
    assert caplog.text.count(f"no kernels of ours for {kind}: TritonError: type fp8e4nv not supported") == 1
    rounding = [module.rounds for module in made.modules() if isinstance(module, KernelGate)]
    assert any(rounding) == (name != "gate_round")
    rounding = [module.norms[0].rounds for module in made.modules() if isinstance(module, KernelLayer)]
    assert any(rounding) == (name != "add_norm_round")


def test_refused_in_float32() -> None:
    with pytest.raises(ModelError, match="dtype is float32"):
        to_fp8(model(torch.float32))
