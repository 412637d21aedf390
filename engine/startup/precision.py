"""Chooses a checkpoint's formats in memory: the rounding of matrices and the type of everything else.

This is the only such place; loading, `check` and the sizes of arenas use its result. Reads no weights.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pilotfish.engine.choices import Weights
from pilotfish.engine.errors import ModelError
from pilotfish.engine.kernels import has_triton
from pilotfish.engine.model.checkpoint import as_model_error, named_type, read_config
from pilotfish.engine.model.decoder.families.table import architecture_for
from pilotfish.engine.model.decoder.shapes import is_aligned
from pilotfish.engine.model.decoder.share import share_of
from pilotfish.engine.model.published.files import tensor_infos
from pilotfish.engine.model.published.methods import Quantisation, quantisation_of
from pilotfish.engine.model.quantize import quantised_as
from pilotfish.engine.native import multiplies

if TYPE_CHECKING:  # for types only: benchmarks/harness/bare.py passes its own class where pydantic is missing
    from transformers import PreTrainedConfig

    from pilotfish.engine.config import EngineConfig

Multiplies = Callable[[torch.dtype], bool]

_OWN = "the checkpoint's own"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# Types by name in safetensors headers.
_STORED = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_ROUNDED_WEIGHTS = {
    "int8": "weights to 8 bits in groups of 32 inputs",
    "int4": "weights to 4 bits (the output head 8) in groups of 32 inputs",
}
_ROW_WISE = ("auto", "native", "rows", "fixed")  # batch-invariant attention in bfloat16


@dataclass(frozen=True, slots=True)
class HeldPrecision:
    """The formats of one model in memory."""

    weights: Weights  # format of float matrices; native: unchanged
    dtype: torch.dtype  # of activations, K/V, and all weights that are not rounded
    why: str
    quantisation: Quantisation | None = None  # of a published quantised checkpoint
    keeps_codes: bool = False  # whether our integer kernels multiply its codes

    @property
    def matrices(self) -> str:
        """The format of matrices: `int8`, `gptq codes`; native for floats."""
        codes = [f"{self.quantisation.method} codes"] if self.quantisation and self.keeps_codes else []
        rounded = [self.weights] if self.weights != "native" else []
        return " and ".join([*codes, *rounded]) or "native"

    def rounding(self, device: torch.device) -> str:
        """A description of the rounding of weights and rows."""
        weights = _ROUNDED_WEIGHTS.get(self.weights)
        if device.type != "cpu":
            return {"int4": "weights to 4 bits in groups of 128 inputs", "fp8": "weights and rows to fp8"}.get(
                self.weights, "none"
            )
        if weights is None and not self.keeps_codes:
            return "none"
        codes = "the checkpoint's own codes" if self.keeps_codes else ""
        rounded = " and ".join(filter(None, (codes, weights)))
        return f"{rounded}; rows to integers of 16 bits, most of which fit in 8"

    @property
    def type_name(self) -> str:
        """The type as it is written in options: `bfloat16`."""
        return str(self.dtype).removeprefix("torch.")

    def __str__(self) -> str:
        return f"{self.type_name}: {self.why}"


def held_as(
    config: EngineConfig,
    name: str,
    revision: str | None,
    asked: Weights,
    device: torch.device,
    *,
    multiplies: Multiplies = multiplies,
    described: PreTrainedConfig | None = None,
) -> HeldPrecision:
    """The formats of the checkpoint `name` on `device`, with weights as `asked` unless already rounded.

    `multiplies`: whether our C multiplies a type on this machine. `described`: the checkpoint's config, if already
    read.

    Raises:
        ModelError: there is no such checkpoint, or the device does not support the configuration.
    """
    described = read_config(name, revision) if described is None else described
    quantisation = quantisation_of(name, described)
    is_ours = architecture_for(described) is not None
    weights = weights_of(name, quantised_as(described), asked, device)
    if weights != "native" and not is_ours:
        raise ModelError(
            f"weights is {weights}, but {name!r} is a {described.model_type} model, which is not in the table of "
            "architectures: transformers runs it, with float weights"
        )
    if config.dtype == "float16" and device.type == "cpu":
        raise ModelError("dtype is float16, which requires cuda; use float32 on cpu")
    on_kernels = quantisation is not None and quantisation.has_integers and device.type == "cpu" and is_ours
    keeps_codes = on_kernels and asked not in ("dequantised", "fp8")
    rounded = quantisation.method if quantisation and keeps_codes and weights == "native" else weights
    if config.tensor_parallel_size > 1 and (keeps_codes or quantised_as(described)):
        codes = f"{quantisation.method if quantisation else weights} weights, which cannot be sharded"
        raise ModelError(f"tensor_parallel_size is {config.tensor_parallel_size}; {name!r} has {codes}")
    dtype, why = _type(config, name, revision, described, device, rounded, multiplies)
    return HeldPrecision(weights, dtype, why, quantisation, keeps_codes)


def _type(
    config: EngineConfig,
    name: str,
    revision: str | None,
    described: PreTrainedConfig,
    device: torch.device,
    rounded: str,
    multiplies: Multiplies,
) -> tuple[torch.dtype, str]:
    """The type of unrounded weights, with the reason; `rounded`: format of matrices, native if not rounded."""
    if config.dtype != "auto":
        return getattr(torch, config.dtype), "configured"
    if rounded == "fp8":
        return torch.bfloat16, "required by fp8 matmuls"
    if rounded != "native" and device.type == "cpu":
        return torch.float32, f"beside {rounded} matrices bfloat16 is no faster"
    own, why = _own(name, revision, described)
    if rounded == "int4" and own == torch.float32:
        return torch.bfloat16, "required by int4 matmuls"
    if device.type != "cpu" or own == torch.float32:
        return own, why
    against = (
        "the checkpoint's float16 is not supported on cpu"
        if own == torch.float16
        else _against_bfloat16(config, described, multiplies)
    )
    return (own, why) if against is None else (torch.float32, against)


def weights_of(name: str, saved: Weights | None, asked: Weights, device: torch.device) -> Weights:
    """The format for rounding float matrices. Raises ModelError if the device does not support it."""
    if asked == "dequantised":
        if saved:
            raise ModelError(
                f"weights is dequantised; {name!r} is saved in {saved}, not a published quantised checkpoint"
            )
        return "native"
    found = saved or asked
    if device.type == "cpu" or found in ("native", "fp8"):
        return found
    if saved or found == "int8":
        how = f"saved in {found}" if saved else f"with {found} weights"
        raise ModelError(f"{name!r} {how} requires cpu; device is {device.type}")
    if not has_triton():
        raise ModelError(f"{name!r} with int4 weights requires Triton on {device.type}, which is not installed")
    return found


def _own(name: str, revision: str | None, described: PreTrainedConfig) -> tuple[torch.dtype, str]:
    """The checkpoint's own type, and its source."""
    own, why = named_type(described), _OWN
    if own is None:
        counts = Counter[str]()
        with as_model_error(name):
            for _, kind, shape in tensor_infos(name, revision):
                counts[kind] += math.prod(shape)
        most = next((kind for kind, _ in counts.most_common() if kind in _STORED), "")
        own, why = _STORED.get(most), "the type of most stored weights (none in its config)"
    if own in _FLOATS:
        return own, why
    found = "no type" if own is None else str(own).removeprefix("torch.")
    return torch.float32, f"the checkpoint has {found}"


def _against_bfloat16(config: EngineConfig, described: PreTrainedConfig, multiplies: Multiplies) -> str | None:
    """Why bfloat16 on a CPU would not be batch-invariant, so that drafts could change tokens; None if it is.

    Our C gives a row the same bits in any batch. torch rounds a row differently for each batch shape. In bfloat16 this
    changes which of two almost equal logits wins; in float32 it almost never does.
    """
    reasons = (
        (config.loop == "rounds", "loop is rounds"),
        (config.attention not in _ROW_WISE, f"attention is {config.attention}"),
        (not multiplies(torch.bfloat16), "the C kernels do not support bfloat16 here (`pilotfish check` reports why)"),
    )
    found = next((reason for applies, reason in reasons if applies), None)
    architecture = architecture_for(described)
    if found is None and (architecture is None or not is_aligned(share_of(architecture, config.tensor_parallel_size))):
        found = "the C kernels do not support all its matrices"
    return None if found is None else f"{found}, and torch's bfloat16 rounding depends on the batch shape"
