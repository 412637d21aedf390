"""Reads hidden states off a decoder's passes, for heads that draft from them."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor

from engine.errors import ModelError

FINAL = -1  # the place after the final norm: what the output matrix reads


class Tap:
    """Keeps hidden states of a decoder's last pass: `[T, hidden]` for each place, one row per token of the batch.

    A place is the number of layers before it: 0 is the embedding, the model's depth the output of its last layer
    before the final norm, and `FINAL` the input of the output matrix.

    Raises:
        ModelError: the model, a decoder, has no such place.
    """

    def __init__(self, model: Any, places: Iterable[int] = (FINAL,)) -> None:
        self.places, self._rows = frozenset(places), dict[int, Tensor]()
        between, layers = sorted(self.places - {FINAL}), model.model.layers
        if between and not 0 <= between[0] <= between[-1] <= len(layers):
            raise ModelError(f"a head reads the target after {between} layers; it has {len(layers)}")
        layers.taps = (*layers.taps, self)

    def read(self, places: Seq[int]) -> Tensor | None:
        """The rows of the last pass at `places`, `[T, len(places) * hidden]`; None before any pass."""
        if not all(place in self._rows for place in places):
            return None
        return torch.cat([self._rows[place] for place in places], -1) if len(places) > 1 else self._rows[places[0]]

    def keep(self, place: int, rows: Tensor) -> None:
        """Rows `[T, hidden]` of the pass that runs; they are read before the next one."""
        self._rows[place] = rows
