"""Attention whose queries grow with their positions, in ragged batches. Knows modules and positions, and no request.

Llama 4 multiplies the queries of its layers without rotary positions by a logarithm of the position (Nakanishi 2025,
arXiv 2501.19399), and counts positions from the first row of a pass: wrong where a row belongs to another sequence, or
to a later part of its own.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from engine.attention.registry import CurrentPass

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def install_temperatures(model: PreTrainedModel, current: CurrentPass) -> None:
    """Scale the queries of such layers where they are projected, by the positions of the current pass."""
    for module in model.modules():
        if getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True):
            module.attn_temperature_tuning = False  # type: ignore[assignment]  # the module's own multiplication
            projection: Any = module.q_proj
            projection.register_forward_hook(partial(_scaled, module, current))


def _scaled(module: Any, current: CurrentPass, _projection: nn.Module, _inputs: object, query: Tensor) -> Tensor:
    """[1, T, ...], multiplied as the module would, in float32; without a ragged batch row t is at position t."""
    own = current.ragged
    positions = torch.arange(query.shape[1], device=query.device) if own is None else own.batch.positions
    scale = torch.log1p(torch.floor((positions.float() + 1.0) / module.floor_scale)) * module.attn_scale + 1.0
    scaled: Tensor = query * scale[:, None]
    return scaled.to(query.dtype)
