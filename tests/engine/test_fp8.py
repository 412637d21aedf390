"""8-bit floats: how they round, which matrices they take, and that a pair of them decodes exactly."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import LlamaConfig

from engine.build import weights_of
from engine.errors import ModelError
from engine.fp8 import LARGEST, Fp8Linear, rounded, to_fp8
from engine.quant import weight_bytes
from tests import fakes, zoo
from tests.loops import engine_of, request

WIDE = LlamaConfig(
    vocab_size=zoo.VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, bos_token_id=1, eos_token_id=zoo.END,
)  # fmt: skip


def model() -> nn.Module:
    return zoo.ours(zoo.with_large_weights(WIDE)).to(torch.bfloat16)


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e4])
def test_rounding_keeps_three_bits(size: float) -> None:
    """Four bits of a number that is not tiny beside its row's largest: off by a sixteenth at most; zeros stay."""
    rows = torch.randn(9, 64, generator=torch.Generator().manual_seed(0)) * size
    rows[3], rows[4, 0] = 0, 0
    bits, scale = rounded(rows)
    assert bits.dtype is torch.float8_e4m3fn
    assert float(bits.float().abs().amax()) == LARGEST
    back = bits.float() * scale
    is_normal = rows.abs() > rows.abs().amax(1, keepdim=True) / LARGEST * 2**-6
    assert ((back - rows).abs() <= rows.abs() / 16)[is_normal].all()
    assert not back[3].any()


def test_a_matmul_is_that_of_the_rounded_numbers() -> None:
    """Rows and matrix rounded, products and sums exact but for the last rounding; a row does not see the others."""
    torch.manual_seed(1)
    linear = nn.Linear(64, 48, dtype=torch.bfloat16)
    x, made = torch.randn(2, 5, 64).bfloat16(), Fp8Linear(linear)
    (rows, row_scale), (weight, weight_scale) = rounded(x.view(-1, 64)), rounded(linear.weight.detach())
    want = (rows.float() * row_scale) @ (weight.float() * weight_scale).t() + linear.bias.float()
    got = made(x)
    assert got.shape == (2, 5, 48)
    assert torch.allclose(got.view(-1, 48).float(), want, rtol=2e-2, atol=2e-2)
    assert torch.allclose(made(x[1:, 2:3])[0, 0].float(), got[1, 2].float(), rtol=1e-2, atol=1e-2)


def test_what_is_rounded() -> None:
    made = model()
    head, plain = made.get_output_embeddings(), weight_bytes(made, torch.bfloat16, "native")
    small = weight_bytes(made, torch.bfloat16, "fp8")
    assert to_fp8(made) == 7 * 2
    assert made.get_output_embeddings() is head
    assert made.model.layers[0].self_attn.q_proj.weight.dtype is torch.float8_e4m3fn
    held = sum(p.numel() * p.element_size() for p in made.parameters())
    assert held == small < plain


def test_refused_in_float32() -> None:
    with pytest.raises(ModelError, match="dtype is float32"):
        to_fp8(zoo.ours(zoo.with_large_weights(WIDE)))


def test_fp8_is_for_any_device_and_other_rounding_for_cpus() -> None:
    assert weights_of("x", WIDE, "fp8", torch.device("cuda")) == "fp8"
    with pytest.raises(ModelError, match="int8 weights runs on cpu alone"):
        weights_of("x", WIDE, "int8", torch.device("cuda"))


@pytest.mark.parametrize("loop", ["plain", "rounds"])
def test_a_draft_in_fp8_changes_no_token(loop: str) -> None:
    """The target as it is, the draft rounded: the tokens of plain decoding, and drafts that are kept."""
    target, draft = model(), model()
    to_fp8(draft)
    asked = [request(i) for i in range(6)]
    plain = fakes.run(engine_of(pair=(target, draft), loop="plain", speculation="off"), asked).tokens
    said = fakes.run(engine_of(pair=(target, draft), loop=loop, proposer="model"), asked)
    same = [said.tokens[name] == tokens for name, tokens in plain.items()]
    assert sum(same) >= len(same) - 1, "in bfloat16 one near-tie may be rounded otherwise in a batch of another shape"
    stats = [ended.stats for ended in said.finished.values()]
    assert sum(s.accepted for s in stats) > sum(s.drafted for s in stats) / 4
