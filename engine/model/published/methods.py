"""The methods of quantisation that are read, by the name that a config gives them; others are refused by that name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from engine.errors import ModelError
from engine.model.gguf.architectures import HAS_CODES, METHOD
from engine.model.gguf.files import open_gguf
from engine.model.published import awq, compressed, fp8, gptq, mxfp4
from engine.model.published.base import Weights
from engine.model.published.files import read_tensors
from engine.model.published.gguf import weights_in
from engine.model.published.saved import with_saved_codes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_Settings = Mapping[str, Any]
_OURS = "pilotfish-"  # `engine.model.quantize` reads these
_FIELDS = ("quantization_config", "compression_config")  # the second one is of early compressed-tensors


@dataclass(frozen=True, slots=True)
class _Method:
    """A module of this package as an entry of the table."""

    check: Callable[[_Settings], None]  # raises ModelError for a variant that is not read
    read: Callable[[_Settings, Mapping[str, Tensor]], Weights]
    has_integers: Callable[[_Settings], bool]


_METHODS = {
    "awq": _Method(awq.check, awq.read, lambda _: True),
    "compressed-tensors": _Method(compressed.check, compressed.read, compressed.has_integers),
    "fbgemm_fp8": _Method(fp8.check, fp8.read, lambda _: False),
    "fp8": _Method(fp8.check, fp8.read, lambda _: False),
    METHOD: _Method(lambda _: None, lambda _, weights: dict(weights), lambda settings: bool(settings[HAS_CODES])),
    "gptq": _Method(gptq.check, gptq.read, lambda _: True),
    "mxfp4": _Method(mxfp4.check, mxfp4.read, lambda _: False),
}


@dataclass(frozen=True, slots=True)
class Quantisation:
    """How a published checkpoint is quantised, from its config."""

    method: str
    settings: _Settings

    @property
    def has_integers(self) -> bool:
        """Whether our integer kernels can multiply its codes."""
        return _METHODS[self.method].has_integers(self.settings)

    def read(self, tensors: Mapping[str, Tensor]) -> Weights:
        """The weights by the names of a float checkpoint; `tensors` may be on the meta device.

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
    """The weights of the checkpoint `name`: floats, and codes as others have published or Pilotfish has saved them.

    `read` reads tensors of safetensors files, or, as `read_headers` does, their types and shapes.

    Raises:
        ModelError: a tensor is missing, or of another shape or type.
    """
    gguf = open_gguf(name, revision)
    if gguf is not None:
        return weights_in(gguf)
    tensors = read(name, revision)
    return with_saved_codes(tensors) if quantisation is None else quantisation.read(tensors)


def quantisation_of(name: str, config: PreTrainedConfig) -> Quantisation | None:
    """How the checkpoint `name` is quantised; None if its weights are floats, or rounded by Pilotfish.

    Raises:
        ModelError: by a method, or in a variant of it, that is not read.
    """
    found = next((found for part in (config, config.get_text_config()) if (found := _settings_of(part))), None)
    if found is None:
        return None
    method = str(found.get("quant_method") or ("bitsandbytes" if "load_in_4bit" in found else "an unnamed method"))
    if method.startswith(_OURS):
        return None
    if method not in _METHODS:
        raise ModelError(f"{name!r} is quantised by {method}; Pilotfish reads {', '.join(sorted(_METHODS))}")
    try:
        _METHODS[method].check(found)
    except ModelError as error:
        raise ModelError(f"{name!r}: {error}") from error
    return Quantisation(method, found)


def _settings_of(config: PreTrainedConfig) -> dict[str, Any] | None:
    found = next((value for field in _FIELDS if (value := getattr(config, field, None))), None)
    return found if isinstance(found, dict) or found is None else found.to_dict()


def without_quantisation(config: PreTrainedConfig) -> PreTrainedConfig:
    """The same config as of a float checkpoint, so that transformers builds its ordinary modules."""
    for part in (config, config.get_text_config()):
        for field in _FIELDS:
            if getattr(part, field, None) is not None:
                delattr(part, field)
    return config
