"""Proposers that were trained for one target: heads on its hidden states, or an adapter of it (Uno).

Owns the heads' checkpoints and their features by position.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, cast

from pilotfish.engine.model.decoder.families.described import ModelConfig
from pilotfish.engine.proposers.heads.base import Head

if TYPE_CHECKING:  # only for types: benchmarks/harness/bare.py passes its own class if pydantic is missing
    from pilotfish.engine.config import EngineConfig
    from pilotfish.engine.model.decoder.decoder import DecoderModel
    from pilotfish.engine.proposers.sources import DraftSource

_HEADS = ("medusa", "eagle", "dflash", "uno")  # each has a module and a function of its name


def load_heads(sources: Mapping[str, DraftSource], config: EngineConfig, target: DecoderModel) -> dict[str, Head]:
    """Load the heads among `sources`, by proposer name.

    Raises:
        ModelError: one of them is incompatible with this target.
    """
    heads = dict[str, Head]()
    for kind in _HEADS:
        if (source := sources.get(kind)) is not None:
            load = getattr(import_module(f"pilotfish.engine.proposers.heads.{kind}"), f"load_{kind}")
            heads[kind] = load(source.name, source.revision, target)
    if isinstance(cast("object", target.config), ModelConfig) and "mtp" not in sources:
        return heads  # these families have no such layers
    from pilotfish.engine.proposers.heads.mtp import load_mtp, log_mtp_layers

    if "mtp" in sources:  # it is part of the target's own checkpoint
        heads["mtp"] = load_mtp(config.target, config.revision, target)
    else:
        log_mtp_layers(config.target, config.revision, target)
    return heads
