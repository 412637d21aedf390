"""Matmuls for CUDA: 8-bit floats (e4m3), and 4-bit weights with 16-bit rows (W4A16). Rows are independent.

fp8: weights have a scale per output, rows are rounded in each pass. For Hopper and later, with torch's matmul.

W4A16: 128 inputs of an output share a scale, and each weight is one of 16 evenly spaced levels, -8 .. 7, without an
offset, as in symmetric GPTQ or AWQ checkpoints. Levels are exact in bfloat16 and a group's sum is scaled in float32, so
the product is that of the dequantised matrix.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from pilotfish.engine.kernels import reference
from pilotfish.engine.kernels.args import GROUP, TILE_OUTPUTS, Fp8Rows

_STEP = 16  # sizes of matrices are multiples of this


class Fp8Linear(nn.Module):
    """Like `nn.Linear`, with bfloat16 input and output; the input may also be rounded already."""

    types = (torch.bfloat16,)  # of rows
    round_rows: Callable[[Tensor], Fp8Rows] = staticmethod(reference.round_rows)  # or a kernel that computes the same

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        rounded = reference.round_rows(linear.weight.detach())
        self.weight = nn.Parameter(rounded.rows, requires_grad=False)
        self.scale = nn.Parameter(rounded.scale.t().contiguous(), requires_grad=False)  # [1, out]
        self.bias: nn.Parameter | None = linear.bias

    def forward(self, x: Tensor | Fp8Rows) -> Tensor:
        """`[..., in]` -> `[..., out]`."""
        given = x if isinstance(x, Fp8Rows) else self.round_rows(x)
        out = torch._scaled_mm(  # noqa: SLF001
            given.rows, self.weight.t(), scale_a=given.scale, scale_b=self.scale, out_dtype=given.dtype,
            use_fast_accum=False,  # less exact than bfloat16, and not faster in decoding
        )  # fmt: skip
        out = out.view(*given.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias

    @staticmethod
    def fits(in_features: int, out_features: int) -> bool:
        """Whether a matrix of these sizes can be multiplied in 8-bit floats."""
        return not in_features % _STEP and not out_features % _STEP

    @staticmethod
    def num_bytes(in_features: int, out_features: int) -> int:
        return in_features * out_features + 4 * out_features


Multiply = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor], Tensor]  # `kernels.w4.w4_matmul`, or its reference
_CHUNK = 512  # outputs per block of rounding
_CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8)  # share of a group's largest weight; clipping it makes steps finer


def round_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Floats `[out, in]` -> levels int16 `[in / 128, out, 32]`, four in a word, and scale float16 `[in / 128, out]`."""
    parts = [_round(part.detach().float()) for part in weight.split(_CHUNK)]
    return torch.cat([words for words, _ in parts], 1), torch.cat([scale for _, scale in parts], 1)


def _round(weight: Tensor) -> tuple[Tensor, Tensor]:
    groups = weight.unflatten(1, (-1, GROUP))  # [out, groups, GROUP]
    largest = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    tries = [_levels(groups, largest * (clip / -8)) for clip in _CLIPS]
    errors = torch.stack([(groups - levels * scale).square().sum(2) for levels, scale in tries])
    best = errors.argmin(0)[..., None]
    levels, scale = (
        torch.stack(found).gather(0, best.expand_as(found[0])[None])[0] for found in zip(*tries, strict=True)
    )
    bits = (levels + 8).int().unflatten(2, (4, -1))  # [out, groups, 4, 32]
    words = bits[:, :, 0] | bits[:, :, 1] << 4 | bits[:, :, 2] << 8 | bits[:, :, 3] << 12
    return words.short().transpose(0, 1), scale[..., 0].t().half()


def _levels(groups: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest levels, and the scale with the least squared error for them."""
    is_zero = scale == 0
    levels = (groups / scale.masked_fill(is_zero, 1)).round().clamp(-8, 7)
    square = (levels * levels).sum(2, keepdim=True)
    return levels, (groups * levels).sum(2, keepdim=True) / square.masked_fill(is_zero, 1)


class W4Linear(nn.Module):
    """Like `nn.Linear`, with 16-bit input and output. Two passes must not run at the same time: `kernels.w4`."""

    words: Tensor
    scale: Tensor
    arrived: Tensor

    types = torch.bfloat16, torch.float16  # of rows
    multiply: Multiply = staticmethod(reference.w4_matmul)  # or a kernel that computes the same

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        words, scale = round_weight(linear.weight)
        # Buffers, because parameters of three dimensions would be mistaken for stacked experts.
        counts = torch.zeros(-(-self.out_features // TILE_OUTPUTS), dtype=torch.int32, device=words.device)
        for name, tensor in (("words", words), ("scale", scale), ("arrived", counts)):
            self.register_buffer(name, tensor.contiguous(), persistent=name != "arrived")
        self.bias: nn.Parameter | None = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in]` -> `[..., out]`."""
        rows = x.reshape(-1, self.in_features).contiguous()
        out = self.multiply(rows, self.words, self.scale, self.bias, self.arrived)
        return out.view(*x.shape[:-1], self.out_features)

    @staticmethod
    def fits(in_features: int, _out_features: int) -> bool:
        """Whether a matrix of these sizes consists of whole groups."""
        return not in_features % GROUP

    @staticmethod
    def num_bytes(in_features: int, out_features: int) -> int:
        return in_features * out_features // 2 + 2 * in_features // GROUP * out_features
