"""Weights of 4 bits for rows in 16: how they round, which matrices they take, and that a pair decodes exactly."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from engine import kernels
from engine.errors import ModelError
from engine.kernels import faults, has_triton, reference
from engine.kernels.args import GROUP
from engine.model.fusion.fuse_cuda import fuse_for_cuda
from engine.model.linear.fp8 import to_fp8
from engine.model.linear.w4 import W4Linear, round_weight, to_w4
from engine.model.quantize import weight_bytes
from engine.startup.precision import weights_of
from tests import fakes
from tests.engine.model.test_fp8 import MULTIPLIES, WIDE, model
from tests.engine.model.test_fuse import logits
from tests.loops import engine_of, request


def dequantised(words: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return reference.w4_matmul(torch.eye(len(words) * GROUP), words, scale, None, scale).t()


@pytest.mark.parametrize("size", [1e-3, 1.0, 100.0])
def test_rounding(size: float) -> None:
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


def test_a_matmul_is_that_of_the_rounded_numbers() -> None:
    torch.manual_seed(1)
    linear = nn.Linear(2 * GROUP, 48, dtype=torch.bfloat16)
    x, made = torch.randn(2, 5, 2 * GROUP).bfloat16(), W4Linear(linear)
    want = x.float() @ dequantised(made.words, made.scale).t() + linear.bias.float()
    assert made(x).shape == (2, 5, 48)
    # float32 sums in another order, then one rounding to bfloat16: near a tie either neighbour
    torch.testing.assert_close(made(x).float(), want, rtol=2**-8, atol=2e-6)


def test_every_matmul_is_in_4_bits_once() -> None:
    """Joined ones and those that a stand-in and its original share; the head stays. Memory is what was foretold."""
    made = model()
    head, small = made.get_output_embeddings(), weight_bytes(made, torch.bfloat16, "int4", on_cuda=True)
    fuse_for_cuda(made, reference)
    swapped = to_w4(made, reference.w4_matmul)
    assert (swapped.done, swapped.stayed) == (4 * 2, {"lm_head": "head"})
    assert made.get_output_embeddings() is head
    linears = [name for name, module in made.named_modules() if isinstance(module, nn.Linear)]
    assert linears == ["lm_head"]
    weights = [*made.parameters(), *(m.words for m in made.modules() if isinstance(m, W4Linear))]
    weights += [module.scale for module in made.modules() if isinstance(module, W4Linear)]
    held = {weight.untyped_storage().data_ptr(): weight.untyped_storage().nbytes() for weight in weights}
    norms = 2 * WIDE.hidden_size * (2 * 2 + 1)  # fused norms have their scales in float32
    assert sum(held.values()) == small + norms


def test_a_model_says_what_its_dequantised_matrices_say() -> None:
    rounded = model()
    fuse_for_cuda(rounded, reference)
    to_w4(rounded, reference.w4_matmul)
    wide = copy.deepcopy(rounded)
    for name, module in list(wide.named_modules()):
        if isinstance(module, W4Linear):
            linear = nn.Linear(module.in_features, module.out_features, bias=False)
            linear.weight.data = dequantised(module.words, module.scale)
            swap_everywhere(wide, name, linear)
    want = logits(wide.float())
    off = (logits(rounded) - want).square().mean().sqrt() / want.std()
    assert off < 0.05, "more than bfloat16 rounds"


def swap_everywhere(model: nn.Module, name: str, new: nn.Module) -> None:
    old = model.get_submodule(name)
    for other in [other for other, module in model.named_modules(remove_duplicate=False) if module is old]:
        model.set_submodule(other, new)


def test_refused_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="dtype is float32"):
        to_w4(model(torch.float32))
    cuda = torch.device("cuda")
    if has_triton():
        assert weights_of("x", None, "int4", cuda) == "int4"
    with pytest.raises(ModelError, match="int8 weights runs on cpu alone"):
        weights_of("x", None, "int8", cuda)
    with pytest.raises(ModelError, match="saved in int4 runs on cpu alone"):
        weights_of("x", "int4", "native", cuda)
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ModelError, match="int4 weights needs Triton"):
        weights_of("x", None, "int4", cuda)


@pytest.mark.skipif(not has_triton(), reason="triton is not installed")
def test_a_kernel_that_does_not_fit_leaves_plain_torch(caplog: pytest.LogCaptureFixture) -> None:
    def multiply(*_: object) -> torch.Tensor:
        raise faults()[0]("out of resource: shared memory")

    made = model()
    with caplog.at_level(logging.WARNING):
        to_w4(made, multiply)
    assert {m.multiply for m in made.modules() if isinstance(m, W4Linear)} == {reference.w4_matmul}
    assert "matmuls in 4 bits: TritonError: out of resource: shared memory" in caplog.text


FOUR_BITS = partial(to_w4, multiply=reference.w4_matmul)


@pytest.mark.parametrize(
    ("rounds", "share", "loop"),
    [
        (FOUR_BITS, 1 / 8, "rounds"),
        pytest.param(FOUR_BITS, 1 / 8, "plain", marks=pytest.mark.slow),
        pytest.param(to_fp8, 1 / 4, "rounds", marks=[pytest.mark.slow, MULTIPLIES]),
        pytest.param(to_fp8, 1 / 4, "plain", marks=[pytest.mark.slow, MULTIPLIES]),
    ],
)
def test_a_rounded_draft_changes_no_token(rounds: Callable[[nn.Module], object], share: float, loop: str) -> None:
    """The target as it is, the draft rounded: the tokens of plain decoding, and drafts that are kept."""
    target, draft = model(), model()
    rounds(draft)
    asked = [request(i) for i in range(6)]
    plain = fakes.run(engine_of(pair=(target, draft), loop="plain", speculation="off"), asked).tokens
    said = fakes.run(engine_of(pair=(target, draft), loop=loop, proposer="model"), asked)
    same = [said.tokens[name] == tokens for name, tokens in plain.items()]
    assert sum(same) >= len(same) - 1, "in bfloat16 one near-tie may be rounded otherwise in a batch of another shape"
    stats = [ended.stats for ended in said.finished.values()]
    assert sum(s.accepted for s in stats) > share * sum(s.drafted for s in stats)
