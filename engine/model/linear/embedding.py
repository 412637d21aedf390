"""A table of embeddings that is not kept as floats: rows are dequantised when they are looked up."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from engine.model.linear.grouped import GroupedCodes


class CodedEmbedding(nn.Module):
    """`nn.Embedding` over a table of codes."""

    def __init__(
        self,
        read: Callable[[Tensor], Tensor],
        shape: tuple[int, int],
        dtype: torch.dtype,
        scale: Tensor | None = None,
        codes: GroupedCodes | None = None,
    ) -> None:
        """`read` takes ids `[n]` and returns float32 rows `[n, width]`; they are multiplied by `scale` (Gemma 3)."""
        super().__init__()
        self.num_embeddings, self.embedding_dim = shape
        self.read, self.codes = read, codes
        # Holds nothing. transformers takes the type of a model from its first parameter; without this one it would be
        # the float32 scale of a fused norm, and keys and values of bfloat16 would not fit into their arena.
        self.weight = nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False)
        self.scale: Tensor | None
        self.register_buffer("scale", scale, persistent=False)

    @classmethod
    def of(cls, codes: GroupedCodes, table: nn.Embedding, dtype: torch.dtype) -> CodedEmbedding:
        """What takes the place of `table`, over codes of its rows."""
        shape = len(codes.codes), codes.in_features
        return cls(lambda ids: codes.rows(ids).dequantised(), shape, dtype, getattr(table, "embed_scale", None), codes)

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids `[...]` -> rows `[..., embedding_dim]`."""
        found = self.read(ids.reshape(-1)).to(self.weight.dtype).view(*ids.shape, self.embedding_dim)
        return found if self.scale is None else found * self.scale.to(found.dtype)
