"""Latent attention (MLA) over what its layers compress keys and values to, instead of what they expand from it.

This module knows the parts of such a layer and no family by name. The layer's own code runs; what it would expand
latents with is multiplied into its queries and results (`kv/latent.py`).
"""

from __future__ import annotations

import logging
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from engine.attention.registry import is_ours
from engine.kv.latent import LatentHeads, latent_of
from engine.model.linear.equivalence import agree, random_rows
from engine.model.linear.rows import matmul_shape

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

EXPANDING = "kv_b_proj"  # the matrix that layers expand latents with
_ROWS = 3  # of an equivalence test


class LatentShape(NamedTuple):
    """The sizes of a layer with latent attention."""

    heads: int
    rank: int  # of a latent
    nope: int  # of a key's part without positions
    rope: int
    value: int


def shape_of_latents(module: nn.Module) -> LatentShape | None:
    """The sizes of a layer that expands latents in a function that can be replaced; None for other modules."""
    names = ("num_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "layer_idx")
    sizes = [size for name in names if isinstance(size := getattr(module, name, None), int)]
    # By its class: a wrapper has the attributes of what it wraps, too.
    if len(sizes) < len(names) or not hasattr(type(module), "expand_kv"):
        return None
    shape, expanding = LatentShape(*sizes[:-1]), getattr(module, EXPANDING, None)
    is_plain = matmul_shape(expanding) == (shape.rank, shape.heads * (shape.nope + shape.value))
    return shape if is_plain and getattr(expanding, "bias", None) is None else None


def has_latents(model: nn.Module) -> bool:
    """Whether a model has such layers."""
    return any(shape_of_latents(module) for module in model.modules())


def compress(model: PreTrainedModel, *, row_wise: bool) -> int:
    """Let all layers with latent attention keep latents; returns how many do from now on.

    If one of them differs from its own code by more than rounding, all stay as they are.

    Args:
        model: a model with our attention, its matrices in any form. Those that expand are read as floats.
        row_wise: a row's bits depend on no other row, also where torch multiplies.
    """
    layers = (module for module in model.modules() if latent_of(module) is None)
    found = [(module, shape) for module in layers if (shape := shape_of_latents(module))]
    made = [_heads_of(model, module, shape, row_wise=row_wise) for module, shape in found]
    if not all(_agrees(model, module, shape, heads) for (module, shape), heads in zip(found, made, strict=True)):
        log.warning("keys and values stay expanded: compressed ones give other results")
        return 0
    for (module, _), heads in zip(found, made, strict=True):
        module.latent = heads
        module.expand_kv = MethodType(_keep, module)  # type: ignore[assignment]
    if found:
        log.info(
            "latent keys and values: %d layers keep them; %s is multiplied in %s", len(found), EXPANDING, model.dtype
        )
    return len(found)


def _keep(layer: Any, latent: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
    """Stands in for `expand_kv`: `[1, 1, T, rank]` and `[1, 1, T, rope]` -> the key of both, and its beginning."""
    if not is_ours(layer.config._attn_implementation):  # noqa: SLF001 - there is no public way to read it
        expanded: tuple[Tensor, Tensor] = type(layer).expand_kv(layer, latent, rotary)
        return expanded
    key = torch.cat([latent, rotary], -1)
    return key, key[..., : latent.shape[-1]]


@torch.no_grad()
def _heads_of(model: PreTrainedModel, module: nn.Module, shape: LatentShape, *, row_wise: bool) -> LatentHeads:
    # A product with the unit matrix reads the weights of any kind of matrix, packed or rounded.
    unit = torch.eye(shape.rank, dtype=model.dtype, device=model.device)
    weight = module.get_submodule(EXPANDING)(unit).t().unflatten(0, (shape.heads, -1))  # [heads, nope + value, rank]
    keys, values = weight.split([shape.nope, shape.value], 1)
    return LatentHeads(keys, values, row_wise=row_wise)


def _agrees(model: PreTrainedModel, module: Any, shape: LatentShape, heads: LatentHeads) -> bool:
    """Whether an equivalence test gives the same scores and values with latents as with what the layer expands."""
    # Rows of the unit matrix, because every kind of matrix multiplies them without rounding them.
    latent = torch.eye(_ROWS, shape.rank, dtype=model.dtype, device=model.device)[None, None]
    rotary = random_rows(model, 1, 1, _ROWS, shape.rope)
    query = random_rows(model, _ROWS, shape.heads, shape.nope + shape.rope)

    def expanded() -> Tensor:
        key, value = (x[0].transpose(0, 1) for x in type(module).expand_kv(module, latent, rotary))
        return torch.cat([(query * key).sum(-1, keepdim=True), value], -1)

    def compressed() -> Tensor:
        key = torch.cat([latent, rotary], -1)[0].transpose(0, 1)  # [T, 1, rank + rope]
        value = heads.expand(key[..., : shape.rank].expand(-1, shape.heads, -1))
        return torch.cat([(heads.absorb(query) * key).sum(-1, keepdim=True), value], -1)

    return agree(lambda way: way(), expanded, compressed)
