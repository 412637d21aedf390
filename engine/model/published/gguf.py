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
from engine.model.gguf.kinds import BlockKind
from engine.model.linear.grouped import GroupedLinear
from engine.model.published.base import Weights


@dataclass(frozen=True, slots=True)
class BlockCodes:
    """One matrix of a file that is stored in blocks of codes."""

    container: Container
    tensor: StoredTensor
    weight: Weight

    @property
    def shape(self) -> tuple[int, ...]:
        """See `Codes`."""
        return self.tensor.shape

    def num_bytes(self) -> int | None:
        """See `Codes`."""
        return self.tensor.num_weights // self.tensor.kind.weights * size_of_codes(self.tensor.kind)

    def dequantised(self) -> Tensor:
        """See `Codes`."""
        raw = self._raw()
        found = dequantised(self.tensor.kind, raw)
        release_mapped(raw)
        return _reordered(found, self.weight)

    def linear(self, bias: Tensor | None, dtype: torch.dtype | None) -> nn.Module | None:
        """See `Codes`."""
        raw = self._raw()
        codes, rows = codes_of(self.tensor.kind, raw), self.weight.rows(self.shape[0])
        release_mapped(raw)
        try:
            return GroupedLinear(replace(codes if rows is None else codes.rows(rows), bias=bias), dtype)
        except ValueError as error:
            raise ModelError(f"{self.container.path}: {self.tensor.name}: {error}") from error

    def embedding(self, table: nn.Embedding, dtype: torch.dtype) -> nn.Module:
        """What takes the place of `table`, over the blocks, which stay in the file."""
        return BlockEmbedding(self._raw(), self.tensor.kind, dtype, getattr(table, "embed_scale", None))

    def _raw(self) -> Tensor:
        return raw_of(self.container, self.tensor)


class BlockEmbedding(nn.Module):
    """`nn.Embedding` whose table stays in blocks, mapped from its file: only rows that are looked up are read."""

    def __init__(self, raw: Tensor, kind: BlockKind, dtype: torch.dtype, scale: Tensor | None = None) -> None:
        """`raw` is `[rows, bytes of a row]`; rows are multiplied by `scale`, where there is one, as in Gemma 3."""
        super().__init__()
        self.num_embeddings, self.embedding_dim = len(raw), raw.shape[1] // kind.size * kind.weights
        self.dtype, self._kind = dtype, kind
        self.raw: Tensor
        self.scale: Tensor | None
        self.register_buffer("raw", raw, persistent=False)
        self.register_buffer("scale", scale, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids `[...]` -> rows `[..., embedding_dim]`."""
        rows = dequantised(self._kind, self.raw[ids.reshape(-1)])
        found = rows.to(self.dtype).view(*ids.shape, self.embedding_dim)
        return found if self.scale is None else found * self.scale.to(self.dtype)


def weights_in(container: Container) -> Weights:
    """All weights of the model in a file, by transformers' names; nothing is read yet.

    Raises:
        ModelError: the file holds a tensor for which its family has no place.
    """
    found: Weights = {}
    for name, weight in weights_of(container).items():
        tensor = container.tensors[weight.stored]
        if tensor.kind.is_float:
            found[name] = _reordered(dequantised(tensor.kind, raw_of(container, tensor)), weight)
        else:
            found[name] = BlockCodes(container, tensor, weight)
    return found


def _reordered(stored: Tensor, weight: Weight) -> Tensor:
    """Undo what the converter to GGUF did to a float weight."""
    rows = weight.rows(len(stored))
    ordered = stored if rows is None else stored[rows]
    return ordered.float() - 1 if weight.minus_one else ordered
