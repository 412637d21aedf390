"""The supported quantisation methods, by name in configs; others are refused by name.

A matrix saved by Pilotfish (`quantize.save_quantised`) has `weight_codes` and, of `GroupedCodes`, those of
`weight_scale`, `weight_offset`, `weight_steps` and `weight_zeros` that are set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pilotfish.engine.errors import ModelError
from pilotfish.engine.model.gguf.container import open_gguf
from pilotfish.engine.model.gguf.families import HAS_CODES, METHOD
from pilotfish.engine.model.published import compressed, floats, gptq
from pilotfish.engine.model.published.base import Codes, Weights, of_groups, with_codes
from pilotfish.engine.model.published.files import read_tensors
from pilotfish.engine.model.published.gguf import weights_in
from pilotfish.engine.native.weights import GroupedCodes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_Settings = Mapping[str, Any]
_OURS = "pilotfish-"  # `engine.model.quantize` reads these
_FIELDS = ("quantization_config", "compression_config")  # the second one is from early compressed-tensors


# Names that other software does not confuse with float weights. `SCALES`: fields of `GroupedCodes`.
CODES = "weight_codes"
SCALES = ("scale", "offset", "steps", "zeros")


@dataclass(frozen=True, slots=True)
class _Method:
    check: Callable[[_Settings], None]  # raises ModelError for an unsupported variant
    read: Callable[[_Settings, Mapping[str, Tensor]], Weights]
    has_integers: Callable[[_Settings], bool] = lambda _: False


_METHODS = {
    "awq": _Method(gptq.check_awq, gptq.read_awq, lambda _: True),
    "compressed-tensors": _Method(compressed.check, compressed.read, compressed.has_integers),
    "fbgemm_fp8": _Method(floats.check_fp8, floats.read_fp8),
    "fp8": _Method(floats.check_fp8, floats.read_fp8),
    METHOD: _Method(lambda _: None, lambda _, weights: dict(weights), lambda settings: bool(settings[HAS_CODES])),
    "gptq": _Method(gptq.check, gptq.read, lambda _: True),
    "mxfp4": _Method(lambda _: None, floats.read_mxfp4),
}


@dataclass(frozen=True, slots=True)
class Quantisation:
    """The quantisation of a published checkpoint, from its config."""

    method: str
    settings: _Settings

    @property
    def has_integers(self) -> bool:
        """Whether our integer kernels can multiply its codes."""
        return _METHODS[self.method].has_integers(self.settings)

    def read(self, tensors: Mapping[str, Tensor]) -> Weights:
        """The weights by the names of a float checkpoint; `tensors` may be meta tensors.

        Raises:
            ModelError: a tensor is missing, or of another shape or type.
        """
        return _METHODS[self.method].read(self.settings, tensors)


def read_weights(
    name: str,
    revision: str | None,
    quantisation: Quantisation | None,
    read: Callable[[str, str | None], Mapping[str, Tensor]] = read_tensors,
) -> Weights:
    """The weights of the checkpoint `name`: floats, and codes, published or saved by Pilotfish.

    `read` reads tensors of safetensors files, or only types and shapes (`read_headers`).

    Raises:
        ModelError: a tensor is missing, or of another shape or type.
    """
    gguf = open_gguf(name, revision)
    if gguf is not None:
        return weights_in(gguf)
    tensors = read(name, revision)
    if quantisation is not None:
        return quantisation.read(tensors)
    kinds = (CODES, *(f"weight_{field}" for field in SCALES))
    return with_codes(tensors, kinds, lambda kind, _: kind == CODES, lambda path: _saved(tensors, path))


def _saved(tensors: Mapping[str, Tensor], path: str) -> Codes:
    """The codes of one matrix saved by Pilotfish."""
    codes, key = tensors[f"{path}.{CODES}"], f"{path}.{CODES}"
    scale, offset, steps, zeros = (tensors.get(f"{path}.weight_{field}") for field in SCALES)
    if scale is None:
        raise ModelError(f"the checkpoint has no scales for {key}")
    made = GroupedCodes(codes, 8 if codes.dtype == torch.int8 else 4, scale, offset, steps=steps, zeros=zeros)
    try:
        made.check()
    except ValueError as error:
        raise ModelError(f"{key}: {error}") from error
    return of_groups(made)


def quantisation_of(name: str, config: PreTrainedConfig) -> Quantisation | None:
    """The quantisation of the checkpoint `name`; None if its weights are floats, or rounded by Pilotfish.

    Raises:
        ModelError: the method or variant is not supported.
    """
    found = next((found for part in (config, config.get_text_config()) if (found := _settings_of(part))), None)
    if found is None:
        return None
    method = str(found.get("quant_method") or ("bitsandbytes" if "load_in_4bit" in found else "missing"))
    if method.startswith(_OURS):
        return None
    if method not in _METHODS:
        raise ModelError(f"{name!r}: quant_method is {method}; supported: {', '.join(sorted(_METHODS))}")
    try:
        _METHODS[method].check(found)
    except ModelError as error:
        raise ModelError(f"{name!r}: {error}") from error
    return Quantisation(method, found)


def _settings_of(config: PreTrainedConfig) -> dict[str, Any] | None:
    found = next((value for field in _FIELDS if (value := getattr(config, field, None))), None)
    return found if isinstance(found, dict) or found is None else found.to_dict()


def without_quantisation(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config without quantisation, so that transformers builds ordinary modules."""
    for part in (config, config.get_text_config()):
        for field in _FIELDS:
            if getattr(part, field, None) is not None:
                delattr(part, field)
    return config
