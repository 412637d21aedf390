"""Reads hidden states off a model's passes, for heads that draft from them."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from engine.errors import ModelError
from engine.model.checkpoint import shape_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FINAL = -1  # the place after the final norm: what the output matrix reads


class Tap:
    """Keeps hidden states of a model's last pass: `[T, hidden]` for each place, one row per token of the batch.

    A place is the number of layers before it: 0 is the embedding, the model's depth the output of its last layer
    before the final norm, and `FINAL` the input of the output matrix.

    Raises:
        ModelError: the model has no such place.
    """

    def __init__(self, model: PreTrainedModel, places: Iterable[int] = (FINAL,)) -> None:
        self.places, self._rows = frozenset(places), dict[int, Tensor]()
        trunk = model.get_decoder()
        if FINAL in self.places:
            # A hook on the trunk, because the output matrix receives only the rows whose logits are wanted.
            trunk.register_forward_hook(self._keep_final)
        between = sorted(self.places - {FINAL})
        if between:
            self._watch_layers(model, between)
        for module in trunk.modules():
            if hasattr(module, "taps"):  # layers that run in one call, past their hooks
                module.taps = (*module.taps, self)

    def _watch_layers(self, model: PreTrainedModel, places: list[int]) -> None:
        depth = shape_of(model.config, "num_hidden_layers")
        if not 0 <= places[0] <= places[-1] <= depth:
            raise ModelError(f"a head reads the target after {places} layers; it has {depth}")
        layers = list(layers_of(model)[1]._modules.values())  # noqa: SLF001 - a `Stack` yields itself as one item
        for place in places:
            if place < depth:
                layers[place].register_forward_pre_hook(partial(self._keep_input, place), with_kwargs=True)
            else:
                layers[-1].register_forward_hook(partial(self._keep_output, depth))

    def read(self, places: Seq[int]) -> Tensor | None:
        """The rows of the last pass at `places`, `[T, len(places) * hidden]`; None before any pass."""
        if not all(place in self._rows for place in places):
            return None
        return torch.cat([self._rows[place] for place in places], -1) if len(places) > 1 else self._rows[places[0]]

    def keep(self, place: int, rows: Tensor) -> None:
        """Rows `[T, hidden]` of the pass that runs; they are read before the next one."""
        self._rows[place] = rows

    def take(self, rows: int) -> dict[int, Tensor]:
        """The first `rows` rows of the last pass at each place."""
        return {place: kept[:rows] for place, kept in self._rows.items()}

    def join(self, passes: Seq[dict[int, Tensor]]) -> None:
        """Keep the rows of several passes as those of one."""
        self._rows = {place: torch.cat([one[place] for one in passes]) for place in passes[0]}

    def _keep_final(self, _trunk: nn.Module, _inputs: object, output: Any) -> None:
        self.keep(FINAL, output[0][0])

    def _keep_input(self, place: int, _layer: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        self.keep(place, (given[0] if given else named["hidden_states"])[0])

    def _keep_output(self, place: int, _layer: nn.Module, _inputs: object, output: Any) -> None:
        self.keep(place, (output[0] if isinstance(output, tuple) else output)[0])


def layers_of(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """The name and the list of a model's decoder layers: the one list of modules as long as the model is deep.

    Raises:
        ModelError: it has none.
    """
    depth = shape_of(model.config, "num_hidden_layers")
    found = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == depth]
    if not found:
        raise ModelError(f"{type(model).__name__} keeps its {depth} layers in no list: no single one can be found")
    return found[0]
