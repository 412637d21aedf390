"""Configs in the form of vLLM's `speculators` library, as one flat object like those of other published heads.

There the fields of the head stand beside `transformer_layer_config`, the config of its layers. Knows no tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.errors import ModelError

KIND = "speculators_model_type"
_LAYER = "transformer_layer_config"


def flattened(config: Mapping[str, Any], name: str, kind: str) -> dict[str, Any]:
    """The config of a head of this `kind`, its layers' fields beside its own; any other form as it is.

    Raises:
        ModelError: it is of another kind, or says nothing of its layers.
    """
    if KIND not in config:
        return dict(config)
    if config[KIND] != kind:
        raise ModelError(f"{name!r}: {KIND} is {config[KIND]!r}; expected {kind!r}")
    layer = config.get(_LAYER)
    if not isinstance(layer, Mapping) or "model_type" not in layer:
        raise ModelError(f"{name!r}: {_LAYER} names no model_type")
    own = {key: value for key, value in config.items() if key not in (_LAYER, "model_type")}
    return {**layer, **own}
