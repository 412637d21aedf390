"""The weights of a GGUF file as `Codes`: blocks of codes go to our integer kernels, and no weight is rounded again."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from engine.errors import ModelError
from engine.machine.mapped import release_mapped
from engine.model.gguf.architectures import Weight, weights_of
from engine.model.gguf.blocks import codes_of, dequantised, raw_of, size_of_codes
from engine.model.gguf.container import Container, StoredTensor
from engine.model.linear.embedding import CodedEmbedding
from engine.model.linear.grouped import GroupedLinear
from engine.model.published.base import Weights
from engine.model.published.stacked import StackedCodes

_STACKED = 3  # dimensions of the matrices of all experts of a layer


@dataclass(frozen=True, slots=True)
class BlockCodes:
    """One matrix of a file that is stored in blocks of codes, or as floats in several tensors."""

    tensors: tuple[StoredTensor, ...]  # their rows follow each other
    weight: Weight

    @property
    def shape(self) -> tuple[int, ...]:
        """See `Codes`."""
        return sum(tensor.shape[0] for tensor in self.tensors), *self.tensors[0].shape[1:]

    def num_bytes(self) -> int | None:
        """See `Codes`."""
        kind, *others = {tensor.kind for tensor in self.tensors}
        size = None if others else size_of_codes(kind)
        return None if size is None else sum(tensor.num_weights for tensor in self.tensors) // kind.weights * size

    def dequantised(self) -> Tensor:
        """See `Codes`."""
        raws = self._raws()
        parts = [dequantised(tensor.kind, raw) for tensor, raw in zip(self.tensors, raws, strict=True)]
        found = _reordered(parts[0] if len(parts) == 1 else torch.cat(parts), self.weight)
        _release(raws)
        return found

    def linear(self, bias: Tensor | None, dtype: torch.dtype | None) -> nn.Module | None:
        """See `Codes`."""
        raws, order = self._raws(), self.weight.order
        codes = codes_of(self.tensors[0].kind, *raws)
        if len(raws) > 1:  # one is released when it is packed
            _release(raws)
        try:
            return GroupedLinear(
                replace(codes if order is None else codes.rows(order(self.shape[0])), bias=bias), dtype
            )
        except ValueError as error:
            raise ModelError(f"{self.tensors[0].path}: {self.tensors[0].name}: {error}") from error

    def embedding(self, table: nn.Embedding, dtype: torch.dtype) -> nn.Module:
        """What takes the place of `table`, over the blocks, which stay in the file."""
        (raw,), kind = self._raws(), self.tensors[0].kind
        shape = len(raw), raw.shape[1] // kind.size * kind.weights
        scale = getattr(table, "embed_scale", None)
        return CodedEmbedding(lambda ids: dequantised(kind, raw[ids]).float(), shape, dtype, scale)

    def _raws(self) -> list[Tensor]:
        return [raw_of(tensor) for tensor in self.tensors]


def _release(raws: list[Tensor]) -> None:
    for raw in raws:
        release_mapped(raw)


def weights_in(container: Container) -> Weights:
    """All weights of the model in a file, by transformers' names; nothing is read yet.

    Raises:
        ModelError: the file holds a tensor for which its family has no place.
    """
    found: Weights = {}
    for name, weight in weights_of(container).items():
        tensors = tuple(container.tensors[stored] for stored in weight.stored)
        if len(tensors[0].shape) == _STACKED:
            found[name] = _stack(tensors, weight)
        elif tensors[0].kind.is_float:
            parts = [dequantised(tensor.kind, raw_of(tensor)) for tensor in tensors]
            found[name] = _reordered(parts[0] if len(parts) == 1 else torch.cat(parts, weight.axis), weight)
        else:
            found[name] = BlockCodes(tensors, weight)
    return found


def _stack(tensors: tuple[StoredTensor, ...], weight: Weight) -> Tensor | StackedCodes:
    """Matrices of experts; those of floats that lie in one tensor, as they must, stay in the file."""
    (first, *others) = tensors
    if first.kind.is_float and not others and not weight.transposed:
        return dequantised(first.kind, raw_of(first))
    matrices = [
        BlockCodes(tuple(tensor.part(expert) for tensor in tensors), weight) for expert in range(first.shape[0])
    ]
    return StackedCodes(matrices, weight.transposed)


def _reordered(stored: Tensor, weight: Weight) -> Tensor:
    """Undo what the converter to GGUF did to numbers."""
    size = stored.shape[weight.axis]
    ordered = stored if weight.order is None else stored.index_select(weight.axis, weight.order(size))
    return ordered if weight.undo is None else weight.undo(ordered)
