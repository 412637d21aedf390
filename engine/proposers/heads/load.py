"""Which heads there are: for each option that names one, how it is loaded."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, cast

from engine.choices import HEADS
from engine.model.decoder.families.described import ModelConfig
from engine.proposers.heads.base import Head

if TYPE_CHECKING:  # for types only: benchmarks/harness/bare.py passes its own class where pydantic is missing
    from engine.config import EngineConfig
    from engine.model.decoder.decoder import DecoderModel


def _loader(option: str) -> Callable[[str, str | None, DecoderModel], Head]:
    found: Callable[[str, str | None, DecoderModel], Head] = getattr(
        import_module(f"engine.proposers.heads.{option}"), f"load_{option}"
    )
    return found


def load_heads(config: EngineConfig, target: DecoderModel) -> dict[str, Head]:
    """Load the heads that `config` names, by proposer name.

    Raises:
        ModelError: one of them does not fit this target.
    """
    named = ((option, getattr(config, option), getattr(config, f"{option}_revision")) for option in HEADS)
    heads = {option: _loader(option)(name, revision, target) for option, name, revision in named if name is not None}
    if isinstance(cast("object", target.config), ModelConfig) and not config.mtp:
        return heads  # none of these families has such layers
    from engine.proposers.heads.mtp import load_mtp, tell_of_mtp

    if config.mtp:  # it is part of the target's own checkpoint
        heads["mtp"] = load_mtp(config.target, config.revision, target)
    else:
        tell_of_mtp(config.target, config.revision, target)
    return heads
