"""Loads a model that is not of the table (`model.architecture`) into transformers' own module. Imports transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from transformers import PreTrainedModel

from engine.choices import Rounded
from engine.model.linear.fp8 import to_fp8
from engine.model.linear.packed import pack
from engine.model.linear.w4 import to_w4
from engine.model.published.load import load_published
from engine.model.quantize import load_quantised, quantise
from engine.model.runner import load_model
from engine.startup.precision import HeldPrecision

if TYPE_CHECKING:  # for types only: benchmarks/harness/bare.py passes its own class where pydantic is missing
    from engine.config import EngineConfig


def load_fallback(
    config: EngineConfig, name: str, revision: str | None, held: HeldPrecision, device: torch.device
) -> PreTrainedModel:
    """Load a model; its matrices are ours where they can be.

    Raises:
        ModelError: it cannot be loaded.
    """
    model = _read(name, revision, held, device)
    if config.fuse and device.type == "cpu" and config.loop != "rounds":  # our C cannot read the batches of rounds
        pack(model)
    if held.weights == "fp8":
        to_fp8(model)
    if held.weights == "int4" and device.type == "cuda":
        to_w4(model)
    return model


def _read(name: str, revision: str | None, held: HeldPrecision, device: torch.device) -> PreTrainedModel:
    """Read a whole model, on a CPU with its matrices rounded as they are to be held."""
    is_rounded = device.type == "cpu" and (held.weights == "int8" or held.weights == "int4")
    if held.quantisation is not None:
        model = load_published(name, revision, held.quantisation, held.dtype, device, keeps_codes=held.keeps_codes)
        if is_rounded:
            quantise(model, cast("Rounded", held.weights))
        return model
    if is_rounded:
        return load_quantised(name, revision, held.dtype, cast("Rounded", held.weights))
    return load_model(name, revision, held.dtype, device)
