"""Proposers that draft with what was trained for one target: heads on its hidden states, or an adapter of it (Uno).

Owns the heads' checkpoints and their features by position. Knows no verification and no scheduler.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, cast

from engine.choices import HEADS
from engine.model.decoder.families.described import ModelConfig
from engine.proposers.heads.base import Head

if TYPE_CHECKING:  # for types only: benchmarks/harness/bare.py passes its own class where pydantic is missing
    from engine.config import EngineConfig
    from engine.model.decoder.decoder import DecoderModel


def load_heads(config: EngineConfig, target: DecoderModel) -> dict[str, Head]:
    """Load the heads that `config` names, by proposer name. Each option has a module and a function of its name.

    Raises:
        ModelError: one of them does not fit this target.
    """
    heads = dict[str, Head]()
    for option in HEADS:
        if (name := getattr(config, option)) is not None:
            load = getattr(import_module(f"engine.proposers.heads.{option}"), f"load_{option}")
            heads[option] = load(name, getattr(config, f"{option}_revision"), target)
    if isinstance(cast("object", target.config), ModelConfig) and not config.mtp:
        return heads  # none of these families has such layers
    from engine.proposers.heads.mtp import load_mtp, tell_of_mtp

    if config.mtp:  # it is part of the target's own checkpoint
        heads["mtp"] = load_mtp(config.target, config.revision, target)
    else:
        tell_of_mtp(config.target, config.revision, target)
    return heads
