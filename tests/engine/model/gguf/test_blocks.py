"""The blocks of GGUF files: floats equal llama.cpp's own dequantisation to the last bit, and so do the codes."""

from __future__ import annotations

import sys

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from pilotfish.engine.errors import ModelError
from pilotfish.engine.model.gguf.blocks import codes_of, dequantised, float_type, size_of_codes
from pilotfish.engine.model.gguf.container import KINDS
from pilotfish.engine.native.weights import splits

ROWS, BLOCKS = 5, 3
STEPS = {
    "Q6_K": (208,),
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "MXFP4": (),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
    "IQ1_M": (),
}  # where float16 are; else 0
QUANTISED = [number for number, kind in KINDS.items() if not kind.is_float]
WIDER = ("Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS", "MXFP4")  # whose codes take more bits in memory than in the file
WITH_CODES = [number for number in QUANTISED if size_of_codes(KINDS[number]) is not None]


def drawn(number: int) -> np.ndarray:
    """Random blocks: all codes, and scales of both signs and many sizes, that are finite."""
    kind, chance = KINDS[number], np.random.default_rng(number)
    blocks = chance.integers(0, 256, (ROWS, BLOCKS, kind.size), np.uint8)
    for at in STEPS.get(kind.name, (0,)):
        steps = (chance.standard_normal((ROWS, BLOCKS)) * 10.0 ** chance.integers(-6, 2, (ROWS, BLOCKS))).astype("<f2")
        blocks[..., at : at + 2] = steps.view(np.uint8).reshape(ROWS, BLOCKS, 2)
    return blocks.reshape(ROWS, -1)


def same_bits(ours: torch.Tensor, theirs: np.ndarray) -> bool:
    return np.array_equal(ours.numpy().view(np.uint32), np.ascontiguousarray(theirs, np.float32).view(np.uint32))


@pytest.mark.parametrize("number", QUANTISED)
def test_floats_are_those_of_the_reference(number: int) -> None:
    raw, kind = drawn(number), KINDS[number]
    found = dequantised(kind, torch.from_numpy(raw))
    assert found.shape == (ROWS, BLOCKS * kind.weights)
    assert same_bits(found, gguf.quants.dequantize(raw, Type(number)))


@pytest.mark.parametrize("number", WITH_CODES)
def test_codes_are_the_same_numbers(number: int) -> None:
    raw, kind = drawn(number), KINDS[number]
    codes = codes_of(kind, torch.from_numpy(raw))
    assert same_bits(codes.dequantised(), gguf.quants.dequantize(raw, Type(number)))
    assert codes.nbytes == size_of_codes(kind) * ROWS * BLOCKS


@pytest.mark.parametrize("number", [number for number in WITH_CODES if splits(KINDS[number].name)])
def test_c_and_torch_split_blocks_alike(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    raw, kind = torch.from_numpy(drawn(number)), KINDS[number]
    found = codes_of(kind, raw, raw.flip(0).repeat(3000, 1))
    monkeypatch.setattr("pilotfish.engine.model.gguf.blocks.splits", lambda _: False)
    wanted = codes_of(kind, raw, raw.flip(0).repeat(3000, 1))
    assert found.bits == wanted.bits
    for name in ("codes", "scale", "offset", "steps", "zeros"):
        ours, torchs = (None if x is None else x[:] for x in (getattr(found, name), getattr(wanted, name)))
        assert (ours is None) == (torchs is None)
        assert ours is None or (ours.dtype == torchs.dtype and torch.equal(ours, torchs))


@pytest.mark.parametrize("number", [number for number, kind in KINDS.items() if kind.is_float])
def test_floats_stay_in_their_type(number: int) -> None:
    numbers = np.random.default_rng(0).standard_normal((ROWS, 32)).astype(np.float32)
    raw = gguf.quants.quantize(numbers, Type(number)).view(np.uint8)
    found = dequantised(KINDS[number], torch.from_numpy(raw))
    assert found.dtype == float_type(KINDS[number])
    assert same_bits(found.float(), gguf.quants.dequantize(raw, Type(number)))


def test_sizes_are_those_of_the_format() -> None:
    sizes = {number: (kind.weights, kind.size) for number, kind in KINDS.items()}
    assert sizes == {number: gguf.GGML_QUANT_SIZES[Type(number)] for number in KINDS}


@pytest.mark.parametrize("number", [number for number in WITH_CODES if KINDS[number].name not in WIDER])
def test_codes_take_as_much_memory_as_the_file(number: int) -> None:
    kind = KINDS[number]
    size = size_of_codes(kind)
    assert kind.size <= size < 1.03 * kind.size


def test_a_matrix_is_cut_into_parts_without_a_trace() -> None:
    number = next(number for number, kind in KINDS.items() if kind.name == "Q4_K")
    raw = torch.from_numpy(drawn(number)).repeat(1000, 1)
    assert torch.equal(dequantised(KINDS[number], raw), dequantised(KINDS[number], raw[:ROWS]).repeat(1000, 1))
    assert torch.equal(
        codes_of(KINDS[number], raw).codes[:], codes_of(KINDS[number], raw[:ROWS]).codes[:].repeat(1000, 1)
    )


def test_types_that_the_package_dequantises_name_it(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = next(kind for kind in KINDS.values() if kind.name == "IQ3_S")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModelError, match=r"IQ3_S requires the package gguf: pip install 'pilotfish\[gguf\]'"):
        dequantised(kind, torch.zeros(1, kind.size, dtype=torch.uint8))
