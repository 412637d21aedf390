"""Chooses the implementation of a model: our decoder, for the table of architectures, or transformers' module.

This is the only such place; loading and `check` use its result. Reads no weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pilotfish.engine.errors import ModelError
from pilotfish.engine.kernels import has_triton
from pilotfish.engine.model.adapters.peft import read_adapter
from pilotfish.engine.model.decoder.architecture import Architecture
from pilotfish.engine.model.decoder.families.table import architecture_for
from pilotfish.engine.model.decoder.latent import LatentLayer, expanded
from pilotfish.engine.model.decoder.share import share_of
from pilotfish.engine.proposers.heads.uno import adapter_folder
from pilotfish.engine.proposers.sources import draft_sources

if TYPE_CHECKING:  # for types only: benchmarks/harness/bare.py passes its own class where pydantic is missing
    from transformers import PreTrainedConfig

    from pilotfish.engine.config import EngineConfig


@dataclass(frozen=True, slots=True)
class Implementation:
    """The implementation of one model.

    Attributes:
        model_type: the family.
        architecture: of the decoder; None for transformers' module.
        why_not: the reason against the decoder; empty if it is used.
        share: the architecture of each shard; equal to `architecture` without sharding.
    """

    model_type: str
    architecture: Architecture | None = None
    why_not: str = ""
    share: Architecture | None = None

    @classmethod
    def of(cls, config: EngineConfig, described: PreTrainedConfig, device: torch.device) -> Implementation:
        """The implementation of a checkpoint with the config `described`, whole or sharded.

        Raises:
            ModelError: it cannot be sharded.
        """
        kind, architecture, shares = described.model_type, architecture_for(described), config.tensor_parallel_size
        why_not = ""
        if architecture is None:
            why_not = f"this {kind} model is not in the table of architectures"
        elif device.type != "cpu" and not has_triton():
            why_not = f"device is {device.type} and Triton is not installed"
        if shares > 1 and why_not:
            raise ModelError(f"tensor_parallel_size is {shares}, which is not supported for {kind}: {why_not}")
        if architecture is None or why_not:
            return cls(kind, why_not=why_not)
        if _changes_latents(config, architecture):
            architecture = expanded(architecture)
        return cls(kind, architecture, share=share_of(architecture, shares))

    def __str__(self) -> str:
        return f"transformers' module: {self.why_not}" if self.architecture is None else f"decoder ({self.model_type})"


def _changes_latents(config: EngineConfig, architecture: Architecture) -> bool:
    """Whether a configured adapter changes the matrix that expands latents."""
    if not any(isinstance(layer.mixer, LatentLayer) for layer in architecture.layers):
        return False
    folders = [Path(folder) for folder in config.adapter.values()]
    uno = draft_sources(config).get("uno")
    folders += [adapter_folder(uno.name, uno.revision)] if uno is not None else []
    return any(path.endswith("kv_b_proj") for folder in folders for path in read_adapter(folder).parts)
