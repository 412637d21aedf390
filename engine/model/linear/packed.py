"""Float matrices in the panels of our C, where a row's sums do not depend on the number of rows.

This file knows modules and no model by name. torch's own float matmuls choose the order of their sums by the shape of
the operands; here it is always the order of the inputs. So floats are batch-invariant, as int8 always is (`int8.py`).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from engine.machine.mapped import release_mapped
from engine.model.linear.activations import make_row_wise
from engine.model.linear.grouped import GroupedLinear, SideBySide
from engine.model.linear.routing import RowWiseRouting, make_routing_row_wise
from engine.model.linear.swap import is_in_router
from engine.model.linear.unstack import has_whole_vectors, recognised, stacked_weights, unstack
from engine.native import ALIGNED, PackedMatrix, multiplies, rows_for

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)


class PackedLinear(nn.Module):
    """`nn.Linear` over a packed matrix."""

    def __init__(self, packed: PackedMatrix, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.packed, self.dtype = packed, dtype  # dtype of the output; None for the type of the input
        self.in_features, self.out_features = packed.in_features, packed.out_features

    @property
    def weight(self) -> Tensor:
        """An empty tensor of the weight's type: Mamba's models ask their head for it."""
        return torch.empty(0, dtype=self.packed.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in]` -> `[..., out]`."""
        dtype = self.dtype or x.dtype
        rows = x.reshape(-1, self.in_features)
        if not len(rows):  # in the middle of a prompt no logits are needed
            return x.new_empty(*x.shape[:-1], self.out_features, dtype=dtype)
        out = self.packed.multiply(rows.to(self.packed.dtype).contiguous(), None, dtype)
        return out.view(*x.shape[:-1], self.out_features)


def pack(model: PreTrainedModel) -> int:
    """Replace every float matmul of a model on the CPU whose type and size our C multiplies; returns how many."""
    head, done = model.get_output_embeddings(), 0
    if model.device.type != "cpu":
        return 0
    if multiplies(model.dtype):
        unstack(model, whole_vectors=True)
    for name in [name for name, module in model.named_modules() if is_matmul(module)]:
        module = cast("nn.Linear", model.get_submodule(name))
        weight = matrix(module)
        if is_in_router(name):  # its own code multiplies the matrix, row-wise where it is a mixture's
            continue
        if multiplies(weight.dtype) and rows_for(weight.dtype, weight.shape[1]) is not None:
            # Logits must be in float32: rounded to bfloat16, many would be equal.
            dtype = torch.float32 if module is head else None
            bias = cast("Tensor | None", module.bias)
            bias = None if bias is None else bias.detach().float()
            model.set_submodule(name, PackedLinear(PackedMatrix.of(weight.detach(), bias), dtype))
            release_mapped(weight)
            done += 1
    make_routing_row_wise(model)
    if is_batch_invariant(model):
        make_row_wise(model)
    log.info("packed: %d float matrices", done)
    return done


def packs_whole(model: nn.Module) -> bool:
    """Whether `pack` would replace all matmuls where C multiplies their type; the model may be on the meta device."""
    matmuls = [module for module in model.modules() if isinstance(module, nn.Linear) or is_transposed(module)]
    packable = {name for name, form in recognised(model) if has_whole_vectors(model.get_submodule(name), form)}
    stacked = {name.rpartition(".")[0] for name, _ in stacked_weights(model)}
    return stacked <= packable and all(
        is_matmul(module) and not matrix(module).shape[1] % ALIGNED for module in matmuls
    )


def is_matmul(module: nn.Module | None) -> bool:
    """Whether a module is a plain matmul of floats, and not of a subclass, which may do more."""
    return type(module) is nn.Linear or is_transposed(module)


def is_transposed(module: nn.Module | None) -> bool:
    """Whether a module is a `Conv1D` of transformers, whose matrix is `[in, out]`: as in GPT-2."""
    return (type(module).__module__, type(module).__name__) == ("transformers.pytorch_utils", "Conv1D")


def matrix(matmul: nn.Module) -> Tensor:
    """The matrix as `[out, in]`; GPT-2 stores it as `[in, out]`."""
    weight = cast("Tensor", matmul.weight)
    return weight.t() if is_transposed(matmul) else weight


def is_batch_invariant(model: nn.Module) -> bool:
    """Whether every matmul of `model` is batch-invariant, because it is in int8, packed or a row-wise router."""
    blocks = [module for module in model.modules() if isinstance(module, RowWiseRouting)]
    matmuls = [module for module in model.modules() if isinstance(module, nn.Linear) or is_transposed(module)]
    return not _has_experts(model) and all(
        any(block.multiplies(matmul.weight) for block in blocks) for matmul in matmuls
    )


def runs_in_c(model: PreTrainedModel) -> bool:
    """Whether our C multiplies all matrices of `model`, so that torch does little work."""
    matmuls = [module for module in model.modules() if isinstance(module, GroupedLinear)]
    return (
        model.device.type == "cpu"
        and is_batch_invariant(model)
        and all(isinstance(matmul.pack(), PackedMatrix) for matmul in matmuls)
    )


def _has_experts(model: nn.Module) -> bool:
    """Whether there are stacked matrices that the model multiplies in its own code (`unstack.py`)."""
    return any(True for _ in stacked_weights(model))


def packed_of(matmul: nn.Module) -> tuple[PackedMatrix, ...] | None:
    """The matrices of `matmul` in our C, if `matmul` returns their products without a change of type; else None."""
    if isinstance(matmul, SideBySide):
        parts = [packed_of(part) for part in matmul.parts]
        return None if None in parts else tuple(matrix for part in parts if part is not None for matrix in part)
    if not isinstance(matmul, GroupedLinear | PackedLinear) or matmul.dtype is not None:
        return None
    found = matmul.pack() if isinstance(matmul, GroupedLinear) else matmul.packed
    return (found,) if isinstance(found, PackedMatrix) else None
