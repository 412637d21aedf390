"""Attention over latents: the matrices that the latents would be expanded with are multiplied into query and result.

In latent attention (MLA, DeepSeek-V2, section 2.1.2 of arXiv 2405.04434) the keys and values of all heads are products
of one latent vector: key = (W_UK latent, rotary part), value = W_UV latent. As q (W_UK c) = (q W_UK) c, and a weighted
sum of W_UV c is W_UV times the weighted sum, no key or value of a head needs to be made. What is kept of a token is one
key, (latent, rotary part), whose beginning is its value. Knows tensors; knows no model.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.native import ALIGNED, PackedMatrices, PackedMatrix, multiplies


class LatentHeads(nn.Module):
    """What the heads of a layer make of latents: W_UK and W_UV of each."""

    def __init__(self, keys: Tensor, values: Tensor, *, row_wise: bool, packs: bool = True) -> None:
        """Take W_UK `[heads, nope, rank]` and W_UV `[heads, value_dim, rank]`.

        `row_wise`: a row's bits depend on no other row, also where torch multiplies. `packs`: on a CPU our C does.
        """
        super().__init__()
        self.nope = keys.shape[1]
        both = keys.transpose(1, 2), values
        self.keys, self.values = (HeadProducts(x, row_wise=row_wise, packs=packs) for x in both)

    def absorb(self, query: Tensor) -> Tensor:
        """Queries `[T, heads, nope + rope]` -> `[T, heads, rank + rope]`, for keys of a latent and a rotary part."""
        nope, rope = query.split([self.nope, query.shape[2] - self.nope], 2)
        return torch.cat([self.keys(nope), rope], 2)

    def expand(self, attended: Tensor) -> Tensor:
        """Weighted sums of latents `[T, heads, rank]` -> of values `[T, heads, value_dim]`."""
        made: Tensor = self.values(attended)
        return made


def latent_of(module: nn.Module) -> LatentHeads | None:
    """The products of a layer that keeps latents (`model.latent`); None for any other."""
    found = getattr(module, "latent", None)
    return found if isinstance(found, LatentHeads) else None


class HeadProducts(nn.Module):
    """A matrix `[out, in]` for each head; in our C where that multiplies its type and size."""

    def __init__(self, weight: Tensor, *, row_wise: bool, packs: bool = True) -> None:
        super().__init__()
        self._packed: PackedMatrices | None = None
        self.row_wise = row_wise
        self.weight: Tensor | None
        self.register_buffer("weight", None, persistent=False)  # a parameter of such a shape would be stacked experts
        if packs and weight.is_cpu and multiplies(weight.dtype) and not weight.shape[2] % ALIGNED:
            self._packed = PackedMatrices([PackedMatrix.of(part.contiguous()) for part in weight])
        else:
            self.weight = weight.transpose(1, 2).contiguous()  # [heads, in, out]

    def forward(self, x: Tensor) -> Tensor:
        """`[T, heads, in]` -> `[T, heads, out]`."""
        by_head = x.transpose(0, 1)
        if self._packed is not None:
            return self._packed.multiply(by_head.contiguous()).transpose(0, 1)
        assert self.weight is not None
        if not self.row_wise:
            return torch.bmm(by_head, self.weight).transpose(0, 1)
        # A product of always the same shape has always the same order of sums.
        rows = [torch.bmm(row[:, None].contiguous(), self.weight)[:, 0] for row in x]
        return torch.stack(rows)
