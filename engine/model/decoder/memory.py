"""How many bytes the weights of a decoder take, from their shapes alone."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

import torch

from engine.choices import Rounded, Weights
from engine.model.decoder.architecture import Architecture
from engine.model.decoder.weights import HEAD, TABLE, converted_by, stack_of
from engine.model.linear.rounding import bits_of, rounded_bytes

if TYPE_CHECKING:
    from engine.model.published.base import Codes

_ROUTERS = ("gate", "router")
# Norms with a row for each head, convolutions of single channels, decays, and what heads skip.
_NO_MATRIX = re.compile(r"norm|\.conv1d\.|\.conv\.conv\.|\.(A_log|D)$")


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
        dtype: of what is neither rounded nor codes.
        weights: how matrices of floats are held.
        codes: the weights that keep the codes of the checkpoint, by their names in a float checkpoint.
        on_cuda: where they are held; else on a CPU.
    """
    shapes = architecture.shapes()
    if architecture.positions is not None:  # those that are computed are held too
        shapes["model.embed_positions.weight"] = architecture.positions.rows, architecture.width
    rounded = None if on_cuda or weights in ("native", "fp8") else cast("Rounded", weights)
    converted = converted_by(weights, on_cuda=on_cuda)
    if architecture.is_tied and rounded is not None and not codes.keys() & {TABLE, HEAD}:
        shapes[HEAD] = shapes[TABLE]  # its panels; the table keeps the codes
    is_tied, kept = architecture.is_tied, dict[str, int]()
    for key, each in codes.items():
        kept[stack_of(key)] = kept.get(stack_of(key), 0) + (each.num_bytes() or 0)

    def size(name: str, shape: tuple[int, ...]) -> int:
        found = kept.get(name, kept.get(HEAD) if is_tied and name == TABLE else None)
        if found is not None:
            return found
        is_matrix = len(shape) == 2 and not _NO_MATRIX.search(name) and not _stays(name)
        if is_matrix and converted is not None and name not in (HEAD, TABLE) and converted.fits(*shape[::-1]):
            return converted.num_bytes(*shape[::-1])
        if rounded is None or not (is_matrix or ".experts." in name) or _stays(name):
            return math.prod(shape) * dtype.itemsize
        if ".experts." in name:
            count, outputs, inputs = shape if not architecture.transposes_experts else (shape[0], shape[2], shape[1])
            shape = count * outputs, inputs
        weight, place = torch.empty(shape[-2:], device="meta"), "" if name == TABLE else name.removesuffix(".weight")
        is_head = name == HEAD or (is_tied and name == TABLE)
        return math.prod(shape[:-2]) * rounded_bytes(weight, bits_of(rounded, place, weight, is_head=is_head))

    return sum(size(name, shape) for name, shape in shapes.items())


def _stays(name: str) -> bool:
    """Whether a matrix is never rounded: it chooses experts, is one row, or expands latents (`kv/latent.py`)."""
    path = name.removesuffix(".weight")
    is_router = any(part in _ROUTERS for part in path.split(".")[-2:])
    small = "expert_gate", "kv_b_proj", "_bias", "embed_positions", "_coefs", "modality_router"
    return is_router or path.endswith(small)
