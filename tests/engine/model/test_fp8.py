"""8-bit floats, and weights of 4 bits for rows in 16: how they round, what they take, that pairs decode exactly."""

from __future__ import annotations

import copy
import dataclasses
import logging

import pytest
import torch
from torch import nn
from transformers import LlamaConfig

from pilotfish.engine import kernels
from pilotfish.engine.choices import Weights
from pilotfish.engine.config import EngineConfig
from pilotfish.engine.errors import ModelError
from pilotfish.engine.kernels import faults, has_triton, reference
from pilotfish.engine.kernels.args import GROUP, LARGEST
from pilotfish.engine.kernels.reference import round_rows
from pilotfish.engine.model.decoder.decoder import DecoderModel
from pilotfish.engine.model.decoder.ops import LayerOps
from pilotfish.engine.model.decoder.shapes import num_bytes
from pilotfish.engine.model.linear.cuda import Fp8Linear, W4Linear, round_weight
from pilotfish.engine.startup.build import load
from pilotfish.engine.startup.precision import weights_of
from pilotfish.models import embedded_target
from tests import fakes, zoo
from tests.loops import engine_of, request
from tests.zoo import logits

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


def made_of(weights: Weights = "native", ops: LayerOps | None = None) -> DecoderModel:
    made = zoo.on_kernels(zoo.with_large_weights(WIDE).to(torch.bfloat16), ops, weights)
    assert isinstance(made, DecoderModel)
    return made


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
    """Bytes of all weights, shared ones once."""
    coded = [tensor for m in made.modules() if isinstance(m, W4Linear) for tensor in (m.words, m.scale)]
    storages = [weight.untyped_storage() for weight in (*made.parameters(), *coded)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize("weights", ["fp8", "int4"])
def test_every_matmul_is_rounded_and_none_is_kept_twice(weights: Weights) -> None:
    made = made_of(weights)
    linears = {name for name, module in made.named_modules(remove_duplicate=False) if isinstance(module, nn.Linear)}
    assert linears == {"lm_head"}
    norms = 2 * WIDE.hidden_size * (2 * 2 + 1)  # whose scales are in float32
    small, plain = (num_bytes(made.architecture, made.dtype, how, {}, on_cuda=True) for how in (weights, "native"))
    assert held(made) == small + norms < plain


def test_routers_experts_and_sizes_that_do_not_fit_stay() -> None:
    config = zoo.config_of("mixtral", num_local_experts=4, num_experts_per_tok=2, num_key_value_heads=1)
    made = zoo.on_kernels(zoo.with_large_weights(config).to(torch.bfloat16), None, "fp8")
    rounded = {name.split(".", 3)[-1] for name, module in made.named_modules() if isinstance(module, Fp8Linear)}
    stay = {name.split(".", 3)[-1] for name, module in made.named_modules() if isinstance(module, nn.Linear)}
    assert (rounded, stay) == ({"self_attn.q_proj.joined.matmul", "self_attn.o_proj"}, {"lm_head"})


@MULTIPLIES
def test_rows_are_rounded_by_what_makes_them() -> None:
    """Norms and gates hand 8-bit floats to the matmul; a copy of the model does the same."""
    calls: list[str] = []

    def counted(name: str):
        def run(*args: object):
            calls.append(name)
            return getattr(reference, name)(*args)

        return run

    kinds = ("add_norm", "add_norm_round", "gate", "gate_round", "round_rows")
    made = made_of("fp8")
    made.use(dataclasses.replace(LayerOps.of(reference), **{name: counted(name) for name in kinds}))
    calls.clear()
    want = logits(made)  # two passes
    assert {name: calls.count(name) for name in kinds} == {
        "add_norm": 2,  # the last sum with the final norm, whose rows the head reads
        "add_norm_round": 2 * 4, "gate": 0, "gate_round": 2 * 2, "round_rows": 2 * 2,
    }  # fmt: skip
    assert torch.equal(logits(copy.deepcopy(made)), want)


@pytest.mark.skipif(not has_triton(), reason="triton is not installed")
@MULTIPLIES
@pytest.mark.parametrize("name", ["gate_round", "add_norm_round", "round_rows"])
def test_without_fp8_in_the_compiler_rows_are_rounded_in_torch(name: str, caplog: pytest.LogCaptureFixture) -> None:
    def fails(*_: object) -> None:
        raise faults()[0]("type fp8e4nv not supported in this architecture")

    made = made_of("fp8")
    want = logits(made)
    with caplog.at_level(logging.WARNING):
        made.use(dataclasses.replace(LayerOps.of(reference), **{name: fails}))
    assert torch.equal(logits(made), want)
    told = f"{name}: falling back to torch, the kernel failed: TritonError: type fp8e4nv not supported"
    assert caplog.text.count(told) == 1


# ------------------------------------------------------------------------------------------------------------ 4 bits


def dequantised(words: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return reference.w4_matmul(torch.eye(len(words) * GROUP), words, scale, None, scale).t()


@pytest.mark.parametrize("size", [1e-3, 1.0, 100.0])
def test_rounding_to_4_bits(size: float) -> None:
    """A normal weight is off by a tenth of its spread; zeros stay, and levels that are given come back."""
    weight = torch.randn(70, 3 * GROUP, generator=torch.Generator().manual_seed(0)) * size
    weight[3], weight[4, :GROUP] = 0, 0
    back = dequantised(*round_weight(weight))
    assert float((back - weight).square().mean().sqrt()) < 0.1 * size
    assert not back[3].any()
    assert not back[4, :GROUP].any()
    levels = torch.randint(-8, 8, (5, GROUP), generator=torch.Generator().manual_seed(1))
    levels[:, 0] = -8
    words, scale = round_weight(levels * 0.25)
    assert torch.equal(reference.w4_levels(words), levels.to(torch.int8))
    assert torch.equal(scale, torch.full_like(scale, 0.25))


def test_a_matmul_in_4_bits_is_that_of_the_rounded_numbers() -> None:
    torch.manual_seed(1)
    linear = nn.Linear(2 * GROUP, 48, dtype=torch.bfloat16)
    x, made = torch.randn(2, 5, 2 * GROUP).bfloat16(), W4Linear(linear)
    want = x.float() @ dequantised(made.words, made.scale).t() + linear.bias.float()
    assert made(x).shape == (2, 5, 48)
    # float32 sums in another order, then one rounding to bfloat16: near a tie either neighbour
    torch.testing.assert_close(made(x).float(), want, rtol=2**-8, atol=2e-6)


def test_refused_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    target = str(embedded_target())
    with pytest.raises(ModelError, match="fp8 weights require bfloat16; dtype is float32"):
        load(EngineConfig(target=target, dtype="float32"), target, None, "fp8", torch.device("cpu"))
    cuda = torch.device("cuda")
    if has_triton():
        assert weights_of("x", None, "int4", cuda) == "int4"
    with pytest.raises(ModelError, match="int8 weights requires cpu"):
        weights_of("x", None, "int8", cuda)
    with pytest.raises(ModelError, match="saved in int4 requires cpu"):
        weights_of("x", "int4", "native", cuda)
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ModelError, match="int4 weights requires Triton"):
        weights_of("x", None, "int4", cuda)


@pytest.mark.skipif(not has_triton(), reason="triton is not installed")
def test_a_kernel_that_does_not_fit_leaves_plain_torch(caplog: pytest.LogCaptureFixture) -> None:
    def multiply(*_: object) -> torch.Tensor:
        raise faults()[0]("out of resource: shared memory")

    made = made_of("int4")
    with caplog.at_level(logging.WARNING):
        made.use(dataclasses.replace(LayerOps.of(reference), w4_matmul=multiply))
    assert {m.multiply for m in made.modules() if isinstance(m, W4Linear)} == {reference.w4_matmul}
    assert "w4_matmul: falling back to torch, the kernel failed: TritonError: out of resource" in caplog.text


@pytest.mark.parametrize(
    ("weights", "share", "loop"),
    [
        ("int4", 1 / 8, "rounds"),
        pytest.param("fp8", 1 / 4, "plain", marks=[pytest.mark.slow, MULTIPLIES]),
    ],
)
def test_a_rounded_draft_changes_no_token(weights: Weights, share: float, loop: str) -> None:
    """The target as it is, the draft rounded: the tokens of plain decoding, and drafts that are kept."""
    target, draft = made_of(), made_of(weights)
    asked = [request(i, max_tokens=10) for i in range(4)]
    plain = fakes.run(engine_of(pair=(target, draft), loop="plain", speculation="off"), asked).tokens
    said = fakes.run(engine_of(pair=(target, draft), loop=loop, proposer="model"), asked)
    same = [said.tokens[name] == tokens for name, tokens in plain.items()]
    assert sum(same) >= len(same) - 1, "in bfloat16 one near-tie may be rounded otherwise in a batch of another shape"
    stats = [ended.stats for ended in said.finished.values()]
    assert sum(s.accepted for s in stats) > share * sum(s.drafted for s in stats)
