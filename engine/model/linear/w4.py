"""Matrices of 4 bits times rows in 16 bits (W4A16), for CUDA: a quarter of the bytes of bfloat16 to read.

128 inputs of an output share a scale, and each weight is one of 16 levels at equal distances, -8 .. 7, without an
offset, as in symmetric checkpoints of GPTQ or AWQ. Levels are exact in bfloat16, and a group's sum is scaled in
float32. So the product is that of the dequantised matrix, without further rounding.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from engine.errors import ModelError
from engine.kernels import has_triton, reference
from engine.kernels.args import GROUP, TILE_OUTPUTS
from engine.model.linear.equivalence import EquivalenceTests, random_rows
from engine.model.linear.swap import Swapped, swap_matmuls

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

Multiply = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor], Tensor]  # `kernels.w4.matmul`, or its reference
_CHUNK = 512  # outputs that are rounded at once
_TRIED = (3, 40, 100)  # rows of the equivalence tests: one number for each size of tile
_CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8)  # share of a group's largest weight: clipping it gives the others finer steps


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
    """Like `nn.Linear`, with 16-bit input and output. Two passes must not run at the same time: `kernels.w4.matmul`."""

    words: Tensor
    scale: Tensor
    arrived: Tensor

    def __init__(self, linear: nn.Linear, multiply: Multiply = reference.w4_matmul) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        words, scale = round_weight(linear.weight)
        # Buffers, so that they are not mistaken for stacked experts, which are parameters of three dimensions.
        counts = torch.zeros(-(-self.out_features // TILE_OUTPUTS), dtype=torch.int32, device=words.device)
        for name, tensor in (("words", words), ("scale", scale), ("arrived", counts)):
            self.register_buffer(name, tensor.contiguous(), persistent=name != "arrived")
        self.bias: nn.Parameter | None = linear.bias
        self.multiply = multiply

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in]` -> `[..., out]`."""
        rows = x.reshape(-1, self.in_features).contiguous()
        out = self.multiply(rows, self.words, self.scale, self.bias, self.arrived)
        return out.view(*x.shape[:-1], self.out_features)


def fits(in_features: int, _out_features: int) -> bool:
    """Whether a matrix of these sizes consists of whole groups."""
    return not in_features % GROUP


def num_bytes(in_features: int, out_features: int) -> int:
    """Bytes of a matrix and its scales."""
    return in_features * out_features // 2 + 2 * in_features // GROUP * out_features


def to_w4(model: PreTrainedModel, multiply: Multiply | None = None) -> Swapped:
    """Round the matrices of a loaded model, one at a time. The head, routers and matrices without whole groups stay.

    If the kernel cannot run here, or fails the equivalence test, plain torch computes the same, which is slow.

    Raises:
        ModelError: the model is not in 16 bits, or Triton is not installed.
    """
    if model.dtype not in (torch.bfloat16, torch.float16):
        raise ModelError(f"int4 weights on cuda are for bfloat16; dtype is {str(model.dtype).removeprefix('torch.')}")
    if multiply is None:
        if not has_triton():
            raise ModelError("int4 weights on cuda need Triton, and it is not installed")
        from engine.kernels import w4  # imports Triton

        multiply = w4.matmul
    swapped = swap_matmuls(model, W4Linear, fits)
    swapped.tell("int4")
    ours = [module for module in model.modules() if isinstance(module, W4Linear)]
    if ours and all(_agrees(model, max(ours, key=lambda m: m.in_features), rows, multiply) for rows in _TRIED):
        for module in ours:
            module.multiply = multiply
    elif ours:
        log.warning("int4 matmuls are plain torch's, which is slow")
    return swapped


def _agrees(model: PreTrainedModel, module: W4Linear, rows: int, multiply: Multiply) -> bool:
    x = random_rows(model, rows, module.in_features)
    rest = module.words, module.scale, module.bias, module.arrived
    return EquivalenceTests().agree("matmuls in 4 bits", lambda way: way(x, *rest), reference.w4_matmul, multiply)
