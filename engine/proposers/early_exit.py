"""The target's first layers as a draft (LayerSkip, Elhoushi et al. 2024, arXiv 2404.16710): same weights, fewer layers.

Untrained for it, a target's early layers speak its output language only roughly; LayerSkip checkpoints were trained to.
"""

from __future__ import annotations

import copy
from itertools import chain
from typing import TYPE_CHECKING

from engine.errors import ModelError
from engine.model.checkpoint import shape_of
from engine.model.fusion.fuse_cuda import link
from engine.model.tap import layers_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def first_layers(model: PreTrainedModel, layers: int) -> PreTrainedModel:
    """A model of the first `layers` decoder layers, then the final norm and head; it shares every weight.

    Raises:
        ModelError: the model has no such layers, or keeps them where we do not find them.
    """
    depth = shape_of(model.config, "num_hidden_layers")
    if not 1 <= layers < depth:
        raise ModelError(f"self_layers is {layers}; the target has {depth} layers: expected 1 to {depth - 1}")
    # Tensors that a deep copy meets in its memo are taken as they are: new modules, the same weights.
    shared = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
    twin = copy.deepcopy(model, shared)
    name, stack = layers_of(twin)
    parent, _, attribute = name.rpartition(".")
    setattr(twin.get_submodule(parent), attribute, stack[:layers])
    link(twin)  # another layer comes before the final norm now
    return twin
