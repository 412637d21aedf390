"""Codes that Pilotfish has rounded and saved (`quantize.save_quantised`). Knows tensors; knows no file.

Of a matrix there are `weight_codes`, and of `GroupedCodes` the fields `weight_scale`, `weight_offset`, `weight_steps`
and `weight_zeros` that it has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from engine.errors import ModelError
from engine.model.linear.embedding import CodedEmbedding
from engine.model.linear.grouped import GroupedCodes, GroupedLinear
from engine.model.published.base import Weights, with_codes

# Names that other software does not mistake for the name of a float weight. `SCALES` are fields of `GroupedCodes`.
CODES = "weight_codes"
SCALES = ("scale", "offset", "steps", "zeros")
_KINDS = (CODES, *(f"weight_{field}" for field in SCALES))


@dataclass(frozen=True, slots=True)
class SavedCodes:
    """The codes of one matrix."""

    codes: GroupedCodes

    @property
    def shape(self) -> tuple[int, ...]:
        """See `Codes`."""
        return len(self.codes.codes), self.codes.in_features

    def num_bytes(self) -> int | None:
        """See `Codes`."""
        return self.codes.nbytes

    def dequantised(self) -> Tensor:
        """See `Codes`."""
        return self.codes.dequantised()

    def linear(self, bias: Tensor | None, dtype: torch.dtype | None) -> nn.Module | None:
        """See `Codes`."""
        return GroupedLinear(replace(self.codes, bias=bias), dtype)

    def embedding(self, table: nn.Embedding, dtype: torch.dtype) -> nn.Module:
        """What takes the place of `table`."""
        return CodedEmbedding.of(self.codes, table, dtype)


def with_saved_codes(tensors: Mapping[str, Tensor]) -> Weights:
    """The weights of a checkpoint, those in codes as `SavedCodes`.

    Raises:
        ModelError: codes do not fit their scales.
    """
    return with_codes(tensors, _KINDS, lambda kind, _: kind == CODES, lambda path: _saved(tensors, path))


def _saved(tensors: Mapping[str, Tensor], path: str) -> SavedCodes:
    codes, key = tensors[f"{path}.{CODES}"], f"{path}.{CODES}"
    scale, *fields = (tensors.get(f"{path}.weight_{field}") for field in SCALES)
    if scale is None:
        raise ModelError(f"the checkpoint lacks the scales of {key}")
    offset, steps, zeros = fields
    made = GroupedCodes(codes, 8 if codes.dtype == torch.int8 else 4, scale, offset, steps=steps, zeros=zeros)
    try:
        made.check()
    except ValueError as error:
        raise ModelError(f"{key}: {error}") from error
    return SavedCodes(made)
