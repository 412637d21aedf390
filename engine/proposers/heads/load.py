"""Which heads there are: for each option that names one, how it is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from transformers import PreTrainedModel

from engine.choices import HEADS
from engine.proposers.heads.base import Head
from engine.proposers.heads.dflash import load_dflash
from engine.proposers.heads.eagle import load_eagle
from engine.proposers.heads.medusa import load_medusa
from engine.proposers.heads.mtp import load_mtp, tell_of_mtp
from engine.proposers.heads.uno import load_uno

if TYPE_CHECKING:  # for types only: benchmarks/harness/bare.py passes its own class where pydantic is missing
    from engine.config import EngineConfig

_BY_OPTION: Mapping[str, Callable[[str, str | None, PreTrainedModel], Head]] = MappingProxyType(
    {"medusa": load_medusa, "eagle": load_eagle, "dflash": load_dflash, "uno": load_uno}
)


def load_heads(config: EngineConfig, target: PreTrainedModel) -> dict[str, Head]:
    """Load the heads that `config` names, by proposer name.

    Raises:
        ModelError: one of them does not fit this target.
    """
    named = ((option, getattr(config, option), getattr(config, f"{option}_revision")) for option in HEADS)
    heads = {option: _BY_OPTION[option](name, revision, target) for option, name, revision in named if name is not None}
    if config.mtp:  # it is part of the target's own checkpoint
        heads["mtp"] = load_mtp(config.target, config.revision, target)
    else:
        tell_of_mtp(config.target, config.revision, target)
    return heads
