"""What is read is what the format says, to the last bit in float32; and so is what the matmuls of codes multiply."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from pilotfish.engine.errors import ModelError
from pilotfish.engine.model.linear.grouped import GroupedLinear
from pilotfish.engine.model.published import floats
from pilotfish.engine.model.published.base import in_groups, pack4, unpack4
from pilotfish.engine.model.published.methods import Quantisation
from tests import published
from tests.drawn import numbers

GOLDEN = load_file(Path(published.__file__).parent / "data" / "published.safetensors")
PACKED_BY_LIBRARIES = sorted({key.partition("/")[0] for key in GOLDEN})  # the formats' own


def read(form: str, tensors: dict[str, Tensor]):
    settings = published.FORMATS[form].settings
    return Quantisation(settings["quant_method"], settings).read(tensors)


@pytest.mark.parametrize("name", PACKED_BY_LIBRARIES)
def test_equals_what_the_formats_own_library_says(name: str) -> None:
    tensors = {key.removeprefix(f"{name}/"): part for key, part in GOLDEN.items() if key.startswith(f"{name}/x.")}
    assert torch.equal(read(name, tensors)["x.weight"].dequantised(), GOLDEN[f"{name}/plain"])


@pytest.mark.parametrize("form", published.FORMATS)
def test_equals_the_formula_and_so_do_matmuls_of_codes_which_take_the_memory_of_the_file(form: str) -> None:
    """Within a tenth for groups of 32, the smallest that are usual; a zero point takes a byte instead of 4 bits."""
    tensors, plain = published.FORMATS[form].write("x", numbers(96, 128))
    stored = sum(part.nbytes for name, part in tensors.items() if not name.endswith(("g_idx", "shape")))
    codes, bias = read(form, tensors)["x.weight"], numbers(96, seed=1)
    assert tuple(codes.shape) == (96, 128)
    assert torch.equal(codes.dequantised(), plain)
    assert (codes.num_bytes is not None) == published.FORMATS[form].on_kernels
    if codes.num_bytes is not None:
        made = GroupedLinear(replace(codes.grouped(), bias=bias))
        assert torch.equal(made.codes.dequantised(), plain)
        x = numbers(3, 128, seed=2)
        want = torch.nn.functional.linear(x, plain, bias)
        assert float((made(x) - want).abs().max()) < 0.05 * float(want.std())
        held = sum(buffer.nbytes for name, buffer in made.named_buffers() if name not in ("order", "bias"))
        assert max(codes.num_bytes, held) <= 1.1 * stored


def test_fp8_in_blocks_equals_transformers() -> None:
    tensors, _ = published.fp8("x", numbers(256, 384), block=(128, 128), suffix="_scale_inv")
    codes = read("fp8-tensor", tensors)["x.weight"]
    want = Fp8Dequantize(None)._dequantize_one(tensors["x.weight"], tensors["x.weight_scale_inv"], torch.float32)
    assert torch.equal(codes.dequantised(), want)


def test_mxfp4_equals_its_formula_and_transformers() -> None:
    """Every code with exponents at both ends; the formula is written in the tests."""
    weight = numbers(2, 64, 8) * torch.logspace(-30, 30, 8)
    tensors, plain = published.mxfp4("experts.x", weight)
    codes = floats.read_mxfp4({}, tensors)["experts.x"]
    assert tuple(codes.shape) == (2, 64, 8)
    assert torch.equal(codes.dequantised(), plain)
    blocks, scales = tensors["experts.x_blocks"], tensors["experts.x_scales"]
    assert torch.equal(codes.dequantised(), convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    assert set(unpack4(blocks).unique().tolist()) >= set(range(16)) - {8}


def test_gptq_version_1_subtracted_from_whole_words() -> None:
    """A zero point of 0 borrows from its neighbour; GPTQModel undoes it by the same addition."""
    tensors, _ = published.gptq("x", numbers(8, 32), version=2, zeros=True)
    zero = torch.tensor([[0, 15, 0, 0, 3, 8, 0, 1]])
    tensors["x.qzeros"] = published.words(zero, 4)
    want = read("gptq-2", tensors)["x.weight"].dequantised()
    tensors["x.qzeros"] = tensors["x.qzeros"] - 0x11111111
    assert torch.equal(read("gptq", tensors)["x.weight"].dequantised(), want)


def test_what_is_not_coded_stays() -> None:
    """Norms, embeddings, biases, and matrices that the format leaves out."""
    for form in published.FORMATS:
        others = {"lm_head.weight": numbers(4, 16), "y.bias": numbers(4), "norm.weight": numbers(16)}
        weights = read(form, others | published.FORMATS[form].write("x", numbers(96, 128))[0])
        assert weights.keys() == others.keys() | {"x.weight"}
        assert all(weights[name] is others[name] for name in others)


@pytest.mark.parametrize(
    ("scale", "told"),
    [
        (lambda _: None, r"has x\.\w+ but no x\.(weight_)?scale"),
        (lambda _: torch.ones(7, 5), r"x\.(weight|scales)"),
        (
            lambda old: old.float().mul(float("nan")).to(old.dtype),
            "the scales of x.weight have NaN or infinite val",
        ),
    ],
    ids=["missing", "of another shape", "not finite"],
)
@pytest.mark.parametrize("form", published.FORMATS)
def test_a_scale_that_is_not_right_is_named(form: str, scale: Callable[[Tensor], Tensor | None], told: str) -> None:
    tensors, _ = published.FORMATS[form].write("x", numbers(96, 128))
    name = next(name for name in tensors if "scale" in name)
    if (changed := scale(tensors.pop(name))) is not None:
        tensors[name] = changed
    with pytest.raises(ModelError, match=told):
        read(form, tensors)["x.weight"].dequantised()


def test_groups_of_unequal_sizes_are_refused() -> None:
    assert in_groups(torch.tensor([0, 0, 1, 1]), 2, "x") is None
    assert in_groups(torch.tensor([1, 0, 1, 0]), 2, "x").tolist() == [1, 3, 0, 2]
    for index in ([0, 0, 0, 1], [0, 0, 2, 2], [0, -1, 1, 1], [0, 0, 1, 1, 1]):
        with pytest.raises(ModelError, match=r"x has groups of unequal sizes; expected 2 equal groups of \d inputs"):
            in_groups(torch.tensor(index), 2, "x")


def test_nibbles() -> None:
    numbers4 = torch.arange(16, dtype=torch.uint8).repeat(3).view(6, 8)
    assert pack4(numbers4)[0].tolist() == [0x10, 0x32, 0x54, 0x76]
    assert torch.equal(unpack4(pack4(numbers4)), numbers4)
