"""The weights of a decoder, with shapes and bytes, recorded while its parts are built without data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from pilotfish.engine.choices import Rounded, Weights
from pilotfish.engine.model.decoder.architecture import Architecture, Layer
from pilotfish.engine.model.decoder.decoder import DecoderLayer, read_ends
from pilotfish.engine.model.decoder.weights import HEAD, TABLE, WeightReader, converted_by, fused_name, linear
from pilotfish.engine.model.linear.rounding import bits_of, rounded_bytes
from pilotfish.engine.native import ALIGNED

if TYPE_CHECKING:
    from pilotfish.engine.model.linear.cuda import Fp8Linear, W4Linear
    from pilotfish.engine.model.published.base import Codes

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class ReadWeight:
    """A weight that a decoder reads.

    Attributes:
        shape: in a checkpoint; matrices of experts are one stack.
        matrix: outputs (of all experts) and inputs, if it is a matrix or a table that may be rounded.
        multiplies: whether rows are multiplied by it, not only looked up.
        rounded: the rounding of float weights, if any.
        converted: the class of its matmul, if its sizes are supported.
    """

    shape: tuple[int, ...]
    matrix: tuple[int, int] | None = None
    multiplies: bool = True
    rounded: Rounded | None = None
    converted: type[Fp8Linear | W4Linear] | None = None


@dataclass(frozen=True, slots=True)
class ShapeReader(WeightReader):
    """Records requested weights in `wanted`; returns zeros without memory (torch's meta device imports compilers)."""

    wanted: dict[str, ReadWeight] = field(default_factory=dict)

    def vector(self, name: str, *size: int) -> Tensor:
        self.wanted[self.path + name] = ReadWeight(size)
        return torch.zeros((), dtype=self.dtype).expand(size)

    floats = vector

    def matrix(
        self, outputs: Mapping[str, int], inputs: int, *, has_bias: bool, orders: object = None, dtype: object = None
    ) -> nn.Module:
        for name, size in outputs.items():
            both = size, inputs
            self.wanted[f"{self.path}{name}.weight"] = ReadWeight(both, both, True, self.rounded, self.converted)
            if has_bias:
                self.vector(f"{name}.bias", size)
        return nn.Identity()

    def experts(
        self, stack: str, parts: object, count: int, outputs: int, inputs: int, *, has_bias: bool, transposed: bool
    ) -> list[nn.Module]:
        sizes = (inputs, outputs) if transposed else (outputs, inputs)
        self.wanted[self.path + stack] = ReadWeight((count, *sizes), (count * outputs, inputs), True, self.rounded)
        if has_bias:
            self.vector(f"{stack}_bias", count, outputs)
        return [linear(torch.zeros(1, 1), None)] * count

    def table(self, name: str, rows: int, size: int, scale: float) -> nn.Module:
        self.wanted[f"{self.path}{name}.weight"] = ReadWeight((rows, size), (rows, size), False, self.rounded)
        return nn.Identity()

    def head_and_table(self, architecture: Architecture) -> tuple[nn.Module, nn.Module]:
        """See `WeightReader`; a tied head is the table."""
        rows, size = architecture.vocab_size, architecture.embedding_width or architecture.width
        shapes = {TABLE: (rows + architecture.spare_rows, size)} | (
            {} if architecture.is_tied else {HEAD: (rows, size)}
        )
        self.wanted.update({name: ReadWeight(both, both, True, self.rounded) for name, both in shapes.items()})
        if architecture.head_bias:
            self.vector("lm_head.bias", rows)
        return nn.Identity(), nn.Identity()


@lru_cache(16)
def wanted_by(
    architecture: Architecture, rounded: Rounded | None = None, converted: type[Fp8Linear | W4Linear] | None = None
) -> Mapping[str, ReadWeight]:
    """The weights of a decoder, by their names in a checkpoint."""
    reader = ShapeReader({}, torch.bfloat16, rounded, packs=False, converted=converted)
    reader.head_and_table(architecture)
    read_ends(nn.Module(), architecture, reader.below("model."))
    alike: dict[Layer, dict[str, ReadWeight]] = {}
    for number, layer in enumerate(architecture.layers):
        if layer not in alike:
            own = replace(reader, wanted={})
            DecoderLayer(architecture, number, own)
            alike[layer] = own.wanted
        for key, weight in alike[layer].items():  # those of shared parts have full names
            reader.wanted[key if key.startswith("model.") else f"model.layers.{number}.{key}"] = weight
    return reader.wanted


def shapes_of(architecture: Architecture) -> Shapes:
    """The shape of every weight of a decoder, by its name in a checkpoint."""
    return {name: weight.shape for name, weight in wanted_by(architecture).items()}


def is_aligned(architecture: Architecture) -> bool:
    """Whether our C can multiply all matrices: row lengths are multiples of a vector."""
    matrices = (each.matrix for each in wanted_by(architecture).values() if each.multiplies)
    return not any(matrix[1] % ALIGNED for matrix in matrices if matrix is not None)


def num_bytes(
    architecture: Architecture,
    dtype: torch.dtype,
    weights: Weights,
    codes: Mapping[str, Codes],
    *,
    on_cuda: bool = False,
) -> int:
    """Bytes of all weights.

    Args:
        architecture: of the decoder.
        dtype: of weights that are neither rounded nor quantised.
        weights: format of float matrices.
        codes: the weights that keep the checkpoint's codes, by their names in a float checkpoint.
        on_cuda: whether they are on CUDA; else on a CPU.
    """
    rounded = None if on_cuda or weights in ("native", "fp8") else cast("Rounded", weights)
    held = wanted_by(architecture, rounded, converted_by(weights, on_cuda=on_cuda))  # type: ignore[arg-type] # hashable
    wanted, is_tied = {**held}, architecture.is_tied
    if architecture.positions is not None:  # computed ones are stored, too
        wanted["model.embed_positions.weight"] = ReadWeight((architecture.positions.rows, architecture.width))
    if is_tied and rounded is not None and not codes.keys() & {TABLE, HEAD}:
        wanted[HEAD] = wanted[TABLE]  # its panels; the table keeps the codes
    kept = dict[str, int]()
    for key, each in codes.items():
        kept[fused_name(key)] = kept.get(fused_name(key), 0) + (each.num_bytes or 0)

    def size(name: str, weight: ReadWeight) -> int:
        found = kept.get(name, kept.get(HEAD) if is_tied and name == TABLE else None)
        if found is not None:
            return found
        matrix, becomes = weight.matrix, weight.converted
        if matrix is not None and becomes is not None and becomes.fits(*matrix[::-1]):
            return becomes.num_bytes(*matrix[::-1])
        if matrix is None or weight.rounded is None:
            return math.prod(weight.shape) * dtype.itemsize
        place, is_head = (
            "" if name == TABLE else name.removesuffix(".weight"),
            name == HEAD or (is_tied and name == TABLE),
        )
        floats = torch.empty(matrix, device="meta")
        return rounded_bytes(floats, bits_of(weight.rounded, place, floats, is_head=is_head))

    return sum(size(name, weight) for name, weight in wanted.items())
